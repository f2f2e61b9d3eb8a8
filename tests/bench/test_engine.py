"""How a case of the engine benchmark sums up its rounds."""

from bench.engine import Case


def test_a_ratio_is_the_median_of_rounds_and_rates_are_of_all_steps() -> None:
    case = Case("decode_b8", tokens_per_step=8)
    case.add([0.1, 0.1, 0.4], [0.2, 0.2, 0.2])  # 2
    case.add([0.2, 0.2], [0.2, 0.2])  # 1
    case.add([0.1], [0.3, 0.3])  # 3
    assert case.report() == {
        "decode_b8_tokens_per_s": 53.33,
        "decode_b8_reference_tokens_per_s": 40.0,
        "decode_b8_ratio": 2.0,
    }
