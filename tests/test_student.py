"""Student's t against tables and against what it must satisfy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estr.student import mean_interval, p_at_most, student_cdf, student_quantile


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042)]
)
def test_quantiles_of_the_tables(freedom, t):
    assert student_quantile(0.975, freedom) == pytest.approx(t, abs=5e-4)


def test_closed_forms_of_one_and_two_degrees():
    for t in (-3.0, -0.5, 0.0, 1.0, 40.0):
        assert student_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi)
        assert student_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)))
    assert student_cdf(math.inf, 7) == 1.0
    with pytest.raises(ValueError, match="degree of freedom"):
        student_cdf(0.0, 0)


@given(st.floats(-50, 50), st.integers(1, 60))
def test_it_is_symmetric_and_grows(t, freedom):
    assert student_cdf(t, freedom) + student_cdf(-t, freedom) == pytest.approx(1.0)
    assert student_cdf(t + 0.1, freedom) > student_cdf(t, freedom) - 1e-12


@given(st.floats(0.5, 0.999), st.integers(1, 40))
def test_the_quantile_is_the_inverse(level, freedom):
    assert student_cdf(student_quantile(level, freedom), freedom) == pytest.approx(level, abs=1e-7)


def test_intervals_and_p_values_agree():
    """A bound at the end of the two-sided 95 % interval has the one-sided p of 0.025."""
    values = [0.1, 0.4, 0.2, 0.35]
    low, high = mean_interval(values)
    # mean 0.2625, standard deviation 0.137689, half width 3.182 * 0.0688446.
    assert (low, high) == pytest.approx((0.0434, 0.4816), abs=1e-4)
    assert p_at_most(values, low) == pytest.approx(0.025)
    assert p_at_most([-v for v in values], -high) == pytest.approx(0.025)
    assert mean_interval([0.5]) is None
    assert mean_interval([0.5, 0.5]) == (0.5, 0.5)
    assert p_at_most([0.5, 0.5], 0.4) == 0.0
    assert p_at_most([0.5, 0.5], 0.5) == 1.0


@pytest.mark.parametrize("number", [5, 10])
def test_a_true_bound_is_rejected_as_often_as_it_says(number):
    """In one of forty samples; a percentile bootstrap of five rejects it in one of fifteen."""
    samples = np.random.default_rng(0).normal(-0.03, 0.05, (4000, number))
    rejected = np.mean([p_at_most(list(sample), -0.03) <= 0.025 for sample in samples])
    assert rejected == pytest.approx(0.025, abs=0.008)
