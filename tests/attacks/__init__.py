"""Attacks on handoffs and pulls: peers that lie, stall, repeat or send something else.

Every attack ends in the right answer or in a named error, and leaves nothing leased. Run the kit
with `pytest tests/attacks`.
"""
