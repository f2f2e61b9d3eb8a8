import subprocess
import sys
import time

import psutil

from runtime.clock import process_age_s


def test_the_age_of_a_process_counts_from_its_start() -> None:
    """As psutil works it out from the time of day."""
    created_s = psutil.Process().create_time()
    before_s = time.time() - created_s
    age_s = process_age_s()
    assert before_s - 2.0 < age_s < time.time() - created_s + 2.0


def test_a_new_process_is_young() -> None:
    code = "import time; time.sleep(0.3); from runtime.clock import process_age_s; print(process_age_s())"
    age_s = float(
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, timeout=60
        ).stdout
    )
    assert 0.29 <= age_s < min(60.0, process_age_s())
