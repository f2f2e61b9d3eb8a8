"""Parsers of external bytes, given damaged ones: `python -m tests.fuzz --cases N --seed S [TARGET
...]`.

A new target is one more entry in `tests/fuzz/targets.py`. Earlier failures are in `corpus/TARGET/`
and are tried first.
"""
