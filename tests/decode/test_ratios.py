from esp_decode.ratios import ratio, with_interval


def test_ratio_by_hand():
    assert ratio([(30, 10), (10, 10)]) == 2.0
    assert ratio([]) == ratio([(0, 0)]) == 1.0


def test_interval():
    assert with_interval([(20, 10)] * 5) == [2.0, 2.0, 2.0]
    middle, low, high = with_interval([(10, 10), (20, 10), (30, 10), (40, 10)])
    assert middle == 2.5 and 1.0 <= low < 2.0 and 3.0 < high <= 4.0
    assert with_interval([(0, 0), (0, 0)]) == [1.0, 1.0, 1.0]


def test_the_interval_narrows_with_more_prompts():
    few, many = ([(10 + i % 4 * 10, 10) for i in range(n)] for n in (8, 200))
    assert with_interval(many)[2] - with_interval(many)[1] < with_interval(few)[2] - with_interval(few)[1]


def test_the_interval_covers_the_mean_of_what_it_was_drawn_from():
    """Nineteen times out of twenty, about: of 100 samples of a coin, 85 at least."""
    import random

    rng = random.Random(0)
    covered = 0
    for _ in range(100):
        _, low, high = with_interval([(rng.choice((1, 3)), 1) for _ in range(40)])
        covered += low <= 2 <= high
    assert 85 <= covered <= 100
