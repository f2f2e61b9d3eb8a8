"""Whatever parses bytes from outside, over damaged ones: `python -m tests.fuzz --cases N --seed S
[TARGET ...]`.

A new target is one more entry in `tests/fuzz/targets.py`. What once broke lies in `corpus/TARGET/`
and is tried first.
"""
