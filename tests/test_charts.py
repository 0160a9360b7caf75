import numpy as np
import pytest

from fef import charts


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (1.0, 300.0, [100, 200, 300]),
        (1.87, 5.5, [2, 3, 4, 5]),
        (-0.3, 0.3, [-0.2, 0, 0.2]),
        (0.0, 4e-5, [0, 1e-5, 2e-5, 3e-5, 4e-5]),
        (0.0, 6.1e7, [0, 2e7, 4e7, 6e7]),
    ],
)
def test_ticks_are_round_and_inside(low, high, expected):
    assert charts.nice_ticks(low, high) == pytest.approx(expected)


def test_bucket_means_leave_out_what_is_not_finite():
    values = np.array([1.0, 3.0, np.nan, 5.0, np.nan, np.nan, 2.0, np.inf])
    np.testing.assert_array_equal(charts.bucket_mean(values, 4), [2.0, 5.0, np.nan, 2.0])
    np.testing.assert_array_equal(charts.bucket_mean(values, 8), values)
    assert charts.bucket_mean(np.ones((10_000, 2, 3)), 7).shape == (7, 2, 3)


def test_downsampling_keeps_every_peak_in_order():
    x_N, y_N = np.arange(10_000.0), np.zeros(10_000)
    y_N[[17, 5_000]], y_N[9_999], y_N[3_000:3_200] = 8.0, -4.0, np.nan
    x_P, y_P = charts.extremes(x_N, y_N, 300)
    assert len(x_P) <= 300 and (np.diff(x_P) > 0).all()
    assert set(x_P[y_P == 8.0]) == {17.0, 5_000.0} and x_P[y_P == -4.0] == [9_999.0]
    assert np.isnan(y_P).any()  # a long gap stays one


@pytest.mark.parametrize(
    ("ratio", "css"),
    [(1.0, "h0"), (1.09, "h0"), (0.92, "h0"), (1.2, "h1"), (0.8, "l1"), (1.5, "h2"), (0.6, "l2"), (3.0, "h3"),
     (0.3, "l3"), (64.0, "h4"), (0.01, "l4"), (0.0, "none"), (float("nan"), "none")],
)  # fmt: skip
def test_heat_colours_are_symmetric_about_balance(ratio, css):
    assert charts.heat_class(ratio) == css


def test_a_peak_gets_a_logarithmic_axis_and_an_even_curve_does_not():
    x_N = np.arange(50.0)
    even = charts.Series("norm", x_N, np.linspace(1, 3, 50), "c1")
    peak = charts.Series("norm", x_N, np.where(x_N == 20, 400.0, 1.0), "c1")
    assert "logarithmic" not in charts.line_chart("Norm", "L2", [even], (0, 49), from_zero=True)
    assert "logarithmic" in charts.line_chart("Norm", "L2", [peak], (0, 49), from_zero=True)


def test_a_value_between_two_gaps_is_drawn_as_a_dot():
    series = charts.Series("loss", np.arange(3.0), np.array([np.nan, 2.0, np.nan]), "c1")
    chart = charts.line_chart("Loss", "nats", [series], (0, 2))
    assert chart.count("<circle") == 1 and "nan" not in chart.lower()


def test_a_bar_far_above_the_rest_is_cut_and_named():
    x_N, y_N = np.arange(1.0, 41.0), np.full(40, 100.0)
    parts = [("compute", "c1", y_N)]
    assert "Above the axis" not in charts.stacked_chart("Step", "ms", x_N, parts)
    y_N[0] = 6383.0
    chart = charts.stacked_chart("Step", "ms", x_N, parts)
    assert "1 of 40 steps, the highest with 6,383 ms at step 1 " in chart
    assert ">6,000<" not in chart and ">100<" in chart
