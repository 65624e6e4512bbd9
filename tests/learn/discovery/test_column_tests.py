"""The tests of independence on data, against scipy, scikit-learn and simulated null distributions."""

import numpy as np
import pytest
from scipy import stats
from sklearn.linear_model import LogisticRegression

from keyquery.learn.discovery.column_tests import Contingency, KernelTest, Regression, likelihood
from keyquery.learn.discovery.independence import Query
from keyquery.learn.discovery.variables import Variables, variables_of


def categories(rng, rows, given=True):
    z = rng.integers(0, 3, rows)
    x, y = (z + rng.integers(0, 2, rows)) % 3, np.where(rng.random(rows) < 0.5, z, rng.integers(0, 3, rows))
    return variables_of(np.stack([x, y, z], 1), discrete=True)


@pytest.mark.parametrize(("pearson", "kind"), [(False, "log-likelihood"), (True, "pearson")])
def test_contingency_tables_against_scipy(pearson, kind):
    data = categories(np.random.default_rng(0), 400)
    test = Contingency(data, 0.05, pearson)
    table = stats.contingency.crosstab(data.codes(0), data.codes(1)).count
    expected = stats.chi2_contingency(table, correction=False, lambda_=kind)
    assert test.probability(Query(0, 1, 0)) == pytest.approx(expected.pvalue, rel=1e-9)
    statistic = freedom = 0
    for stratum in range(3):
        rows = data.codes(2) == stratum
        table = stats.contingency.crosstab(data.codes(0)[rows], data.codes(1)[rows]).count
        part = stats.chi2_contingency(table, correction=False, lambda_=kind)
        statistic, freedom = statistic + part.statistic, freedom + part.dof
    assert test.probability(Query(0, 1, 0b100)) == pytest.approx(stats.chi2.sf(statistic, freedom), rel=1e-9)


def test_a_table_with_few_rows_per_cell_says_nothing():
    rng = np.random.default_rng(0)
    test = Contingency(variables_of(rng.integers(0, 4, (30, 3)), discrete=True), 0.05)
    assert test.statistic(Query(0, 1, 0b100)) == np.inf


def by_f_test(data, query):
    """The textbook's F test of y in a linear regression of x."""
    x = data.values[:, query.x]
    z = [data.values[:, node] for node in range(len(data.names)) if query.given >> node & 1]
    small = np.column_stack([np.ones(len(x)), *z])
    size = data.sizes[query.y]
    block = data.values[:, [query.y]] == np.arange(1, size) if size else data.values[:, [query.y]]
    rss = [np.linalg.lstsq(part, x, rcond=None)[1][0] for part in (small, np.column_stack([small, block]))]
    more, left = block.shape[1], len(x) - small.shape[1] - block.shape[1]
    return stats.f.sf((rss[0] - rss[1]) / more / (rss[1] / left), more, left)


@pytest.mark.parametrize("given", [0, 0b0100, 0b1100])
@pytest.mark.parametrize("size", [0, 3])
def test_linear_regressions_against_the_f_test(size, given):
    rng = np.random.default_rng(1)
    z = rng.normal(size=(120, 2))
    y = rng.integers(0, 3, 120) if size else z[:, 0] + rng.normal(size=120)
    x = z.sum(1) + 0.2 * y + rng.normal(size=120)
    data = Variables(list("xyzw"), np.column_stack([x, y, z]), [0, size, 0, 0])
    found = [Regression(data, 0.05).probability(Query(*pair, given)) for pair in ((0, 1), (1, 0))]
    assert found[0] == found[1] or found == pytest.approx([found[0]] * 2, rel=1e-6)  # the order does not matter
    assert found[0] == pytest.approx(by_f_test(data, Query(0, 1, given)), rel=0.02)  # χ² with Bartlett's correction


def test_logistic_likelihood_against_scikit_learn():
    rng = np.random.default_rng(2)
    regressors = np.column_stack([np.ones(200), rng.normal(size=(200, 2))])
    codes = (regressors[:, 1] + rng.logistic(size=200) > 0).astype(int) + (regressors[:, 2] > 0.5)
    model = LogisticRegression(C=np.inf, tol=1e-9, max_iter=1000, fit_intercept=False).fit(regressors, codes)
    expected = model.predict_log_proba(regressors)[np.arange(200), codes].sum()
    assert likelihood(codes, 3, regressors) == pytest.approx(expected, abs=1e-5)
    assert likelihood((regressors[:, 1] > 0).astype(int), 2, regressors) == pytest.approx(0, abs=1e-2)  # separable


def mixed(rng, rows, effect):
    z = rng.normal(size=rows)
    x = (z + rng.logistic(size=rows) > 0).astype(float)
    y = (z + effect * x + rng.logistic(size=rows) > 0).astype(float)
    return Variables(list("xyz"), np.column_stack([x, y, z]), [2, 2, 0])


def nonlinear(rng, rows, effect):
    z, noise = rng.normal(size=rows), 0.5 * rng.normal(size=rows)
    y = z**2 / 2 + 0.5 * rng.normal(size=rows) + 4 * effect * (noise**2 - 0.25)
    return Variables(list("xyz"), np.column_stack([np.sin(2 * z) + noise, y, z]), [0, 0, 0])


@pytest.mark.parametrize(
    ("test", "draw", "rows", "times"), [(Regression, mixed, 200, 60), (KernelTest, nonlinear, 200, 40)]
)
@pytest.mark.slow
def test_levels_and_power_by_simulation(test, draw, rows, times):
    rng = np.random.default_rng(3)
    p = {
        effect: np.array([test(draw(rng, rows, effect), 0.1).probability(Query(0, 1, 0b100)) for _ in range(times)])
        for effect in (0, 1)
    }
    allowed = stats.binom.ppf(0.999, times, 0.1) / times  # of a test that keeps its level of 0.1
    assert (p[0] < 0.1).mean() <= allowed
    assert (p[1] < 0.1).mean() >= 0.6
    marginal = test(draw(rng, rows, 0), 0.1).probability(Query(0, 2, 0))
    assert marginal < 0.01  # x depends on z


def test_the_kernel_test_given_others_is_its_definition():
    rng = np.random.default_rng(5)
    z = rng.normal(size=(40, 2))
    x = z[:, 0] ** 2 + 0.3 * rng.normal(size=40)
    data = variables_of(np.column_stack([x, z[:, 1] + x / 2 + rng.normal(size=40), z]))
    scaled, centre = stats.zscore(data.values), np.eye(40) - 1 / 40

    def gram(columns, width):
        return np.exp(-np.square(scaled[:, None, columns] - scaled[None, :, columns]).sum(-1) / (2 * width**2))

    width = 1.2 * np.sqrt(2)  # as published for fewer than 200 rows
    residual = 1e-3 * np.linalg.inv(centre @ gram([2, 3], width) @ centre + 1e-3 * np.eye(40))

    def p(first, second):
        kernels = gram([first], width) * gram([2, 3], 2 * width), gram([second], width)
        product = np.prod([residual @ centre @ kernel @ centre @ residual for kernel in kernels], axis=0)
        mean, variance = np.trace(product), 2 * np.square(product).sum()
        return stats.gamma.sf(product.sum(), mean**2 / variance, scale=variance / mean)

    both = p(0, 1), p(1, 0)
    expected = min(2 * min(both), max(both))
    assert KernelTest(data, 0.01).probability(Query(0, 1, 0b1100)) == pytest.approx(expected, rel=1e-6)
    assert 1e-6 < expected < 0.9


def test_a_bound_decides_as_the_probability_does():
    rng, seen = np.random.default_rng(3), set()
    for strength in (0.0, 0.1, 0.3, 1.0):
        z = rng.normal(size=60)
        x = z + rng.normal(size=60)
        data = variables_of(np.stack([x, z + strength * x + rng.normal(size=60), z], 1))
        test = KernelTest(data, 0.01)
        for query in (Query(0, 1, 4), Query(0, 2, 2), Query(1, 2, 1), Query(0, 1, 0)):
            exact, bound = test.probability(query), test.decisive(query)
            assert exact <= bound * (1 + 1e-9)
            assert (exact < 0.01) == (bound < 0.01)
            assert exact >= 0.01 or bound < 0.01
            assert exact < 0.01 or exact == pytest.approx(bound)
            seen.add(exact < 0.01)
    assert seen == {True, False}
