import json

from bench.report import render


def test_json_report_names_the_machine() -> None:
    report = json.loads(render("sample", {"ratio": 0.5}, as_json=True))
    assert (report["bench"], report["ratio"]) == ("sample", 0.5)
    assert report["environment"]["num_cores"] >= 1
    assert (
        render("sample", {"ratio": 0.51234567, "n": 3}, as_json=False)
        == "sample\n  ratio  0.5123\n  n      3"
    )
