"""See `tests/fuzz/__init__.py`. Ends with 1 when anything was found; `--keep` puts it into the
corpus."""

import argparse
import hashlib
import sys
import time

from tests.fuzz.engine import CORPUS, run
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="*", choices=[[], *TARGETS], help="default: all")
    parser.add_argument("--cases", type=int, default=10_000, help="per target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="write what is found into the corpus")
    arguments = parser.parse_args()
    num_found = 0
    for name in arguments.target or TARGETS:
        began_s, problems = time.perf_counter(), set[str]()
        for finding in run(TARGETS[name], cases=arguments.cases, seed=arguments.seed):
            num_found += 1
            if finding.problem[:60] in problems:
                continue
            problems.add(finding.problem[:60])
            print(finding, flush=True)
            if arguments.keep:
                (CORPUS / name).mkdir(parents=True, exist_ok=True)
                (
                    CORPUS / name / f"{hashlib.sha256(finding.data).hexdigest()[:12]}.bin"
                ).write_bytes(finding.data)
        print(
            f"{name}: {arguments.cases} cases, {len(problems)} kinds of problems, "
            f"{time.perf_counter() - began_s:.0f} s",
            flush=True,
        )
    return 1 if num_found else 0


if __name__ == "__main__":
    sys.exit(main())
