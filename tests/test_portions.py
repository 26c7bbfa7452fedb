"""Which cases of slow tests a run takes (portions.py), and that what is known of them is of tests that there are."""

import collections
import pathlib

import portions

ROOT = pathlib.Path(__file__).parents[1]
CASES = [f"a.py::test_slow[{number}]" for number in range(20)] + [f"a.py::test_quick[{number}]" for number in range(20)]
SECONDS = {"a.py::test_slow": portions.PORTION / 4, "a.py::test_quick": 0.0}


def test_a_slow_test_runs_with_as_many_cases_as_fit_and_others_each_day():
    runs = [set(CASES) - portions.left_out(CASES, set(), SECONDS, f"day {day}") for day in range(30)]
    for run in runs:
        assert collections.Counter(map(portions.test_of, run)) == {"a.py::test_slow": 4, "a.py::test_quick": 20}
    assert set.union(*runs) == set(CASES)
    assert portions.left_out(CASES, set(), SECONDS, "day 0") == set(CASES) - runs[0]


def test_cases_that_are_named_run_and_count():
    named = set(CASES[:2])
    run = set(CASES[:20]) - portions.left_out(CASES[:20], named, SECONDS, "")
    assert named < run and len(run) == 4
    outs = [portions.left_out(CASES[:20], set(CASES[:6]), SECONDS, f"day {day}") for day in range(60)]
    assert {len(out) for out in outs} == {20 - 6 - portions.LEAST_CASES}
    assert set.intersection(*outs) == set(), "each of the others runs on some day"


def test_of_a_slow_or_unknown_test_some_cases_run():
    seconds = {"a.py::test_slow": portions.LONG}
    assert len(portions.left_out(CASES[:20], set(), seconds, "")) == 20 - portions.LEAST_CASES
    assert portions.left_out(CASES, set(), {}, "")


def test_of_long_tests_a_third_runs_and_the_others_another_day():
    tests = [f"a.py::test_{number}" for number in range(10)]
    seconds = dict.fromkeys(tests, portions.LONG + 1) | {"a.py::test_short": portions.LONG}
    cases = [*tests, "a.py::test_short", *portions.EACH_DAY]
    seconds |= dict.fromkeys(portions.EACH_DAY, portions.LONG + 1)
    outs = [portions.left_out(cases, set(), seconds, f"day {day}") for day in range(30)]
    assert {len(out) for out in outs} == {6}
    assert set.union(*outs) == set(tests)
    assert not portions.left_out(cases, set(tests), seconds, "")


def test_of_a_third_of_tests_with_long_cases_one_case_runs():
    cases = [f"a.py::test_{number}[{case}]" for number in range(9) for case in range(3)]
    seconds = dict.fromkeys({portions.test_of(case) for case in cases}, portions.LONG + 1)
    for day in range(9):
        run = [case for case in cases if case not in portions.left_out(cases, set(), seconds, f"day {day}")]
        assert len(run) == 3 == len({portions.test_of(case) for case in run})
    assert cases[0] not in portions.left_out(cases, {cases[0]}, seconds, "")


def test_files_that_take_long_begin_and_tests_keep_their_order(monkeypatch):
    monkeypatch.setattr(portions, "known", lambda: {"b.py::test_long": 30.0, "a.py::test_short": 1.0})
    tests = ["a.py::test_short[0]", "a.py::test_short[1]", "b.py::test_long", "c.py::test_new"]
    assert portions.longest_first(tests, key=str) == [tests[2], tests[3], *tests[:2]]


def test_seconds_are_of_tests_that_there_are():
    texts = {file.name: file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    for test in {*portions.known(), *portions.EACH_DAY}:
        path, _, name = test.partition("::")
        if path.startswith("tests/"):
            assert f"def {name.rpartition('::')[2]}(" in texts[pathlib.Path(path).name], f"{test}: no such test"
