"""Check the subject of a commit message: imperative and at most 72 characters.

The `commit-msg` hook of pre-commit runs `python -m tools.commit_subject FILE`.
"""

import re
import sys
from pathlib import Path

MAX_CHARACTERS = 72
# Words that begin a noun phrase or a clause. The check cannot know every noun: a reviewer can.
_NOT_VERBS = frozenset(
    "a an the what who whom whose which where when how why whether that this these those it its "
    "there no not of in on at by for from with without to as so some all every each both two "
    "one only and or but if".split()
)
_NOT_IMPERATIVE = re.compile(r"\w{3,}(ing|ed|ly|tion)")
_IMPERATIVE = frozenset(
    "bring embed feed ping ring seed shed speed string apply rely reply".split()
)
_AUTOMATIC = ("Merge ", "Revert ", "fixup! ", "squash! ")


def problem_of(message: str) -> str | None:
    """Return what is wrong with the first line of a commit message, None if nothing is."""
    subject, _, rest = message.partition("\n")
    if subject.startswith(_AUTOMATIC):
        return None
    if not subject.strip():
        return "the subject is empty"
    if len(subject) > MAX_CHARACTERS:
        return f"the subject has {len(subject)} characters, the limit is {MAX_CHARACTERS}"
    if rest.split("\n", 1)[0].strip():
        return "the line after the subject must be empty"
    if subject.endswith("."):
        return "the subject ends with a period"
    word = subject.split()[0]
    if not word[0].isupper():
        return f"the subject begins with {word!r}, not with a capital letter"
    lower = word.lower()
    if lower in _NOT_VERBS or (_NOT_IMPERATIVE.fullmatch(lower) and lower not in _IMPERATIVE):
        return f"the subject begins with {word!r}, not with a verb in the imperative"
    return None


def main() -> int:
    """Print the problem with the message in the file that the command line names."""
    lines = Path(sys.argv[1]).read_text().splitlines()
    problem = problem_of("\n".join(line for line in lines if not line.startswith("#")))
    if problem is not None:
        print(
            f"{problem}: write it like 'Bound the decompressed size of messages'", file=sys.stderr
        )
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
