"""sweeps.py chooses the cases of an ordinary run."""

import dataclasses
import pathlib

import pytest

import sweeps

TESTS = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Item:
    """The attributes of a test that sweeps.py uses."""

    nodeid: str
    marks: tuple[pytest.Mark, ...] = ()

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)


def kept(*marks: pytest.MarkDecorator, quick: tuple[int, ...] = (), named: tuple[int, ...] = ()) -> list[int]:
    """Return which of 20 cases of a test an ordinary run takes."""
    own = tuple(mark.mark for mark in marks)
    items = [Item(f"a.py::test[{i}]", (*own, pytest.mark.quick.mark) if i in quick else own) for i in range(20)]
    out = sweeps.left_out(items, named={f"a.py::test[{i}]" for i in named})
    return [i for i, item in enumerate(items) if item.nodeid not in out]


@pytest.mark.parametrize(
    ("count", "expected"), [(0, []), (1, [10]), (2, [5, 15]), (3, [3, 10, 16]), (20, [*range(20)]), (30, [*range(20)])]
)
def test_spread_takes_cases_at_even_distances(count, expected):
    assert sweeps.spread(range(20), count) == expected


def test_table_has_the_named_cases_and_a_sample_in_order(monkeypatch):
    monkeypatch.setattr(sweeps, "SWEEP", False)
    assert sweeps.taken("numbers", range(10), always=[9, 0], sample=2) == [0, 3, 7, 9]
    with pytest.raises(AssertionError, match="not in the table numbers"):
        sweeps.taken("numbers", range(10), always=[10])
    monkeypatch.setattr(sweeps, "SWEEP", True)
    assert sweeps.taken("numbers", range(10)) == [*range(10)]


def test_test_without_a_mark_runs_with_all_its_cases():
    assert kept() == [*range(20)]


def test_sweep_mark_counts_cases_that_are_quick_or_named():
    assert kept(pytest.mark.sweep(2)) == [5, 15]
    assert kept(pytest.mark.sweep(3), named=(0, 1)) == [0, 1, 11]
    assert kept(pytest.mark.sweep(1), quick=(3, 4)) == [3, 4]
    assert kept(pytest.mark.sweep(3), quick=(3,), named=(3, 4)) == [3, 4, 11]


def test_slow_test_runs_only_with_its_quick_cases():
    assert kept(pytest.mark.slow) == []
    assert kept(pytest.mark.slow, quick=(3,), named=(4,)) == [3]
    assert kept(pytest.mark.slow, pytest.mark.sweep(2)) == []


def test_files_that_take_longest_begin_and_tests_keep_their_order(monkeypatch):
    monkeypatch.setattr(sweeps, "LONGEST", ["b.py", "d.py"])
    names = ["tests/a.py::test_1", "tests/d.py::test_1", "tests/b.py::test_2", "tests/b.py::test_1", "tests/c.py::test"]
    found = [item.nodeid for item in sorted(map(Item, names), key=sweeps.place)]
    assert found == [names[2], names[3], names[1], names[0], names[4]]


def test_longest_files_exist():
    assert [file for file in sweeps.LONGEST if not (TESTS / file).is_file()] == []


def test_each_sweep_mark_takes_at_least_one_case(request):
    marks = [item.get_closest_marker("sweep") for item in request.session.items]
    assert [mark for mark in marks if mark and (len(mark.args) != 1 or mark.args[0] < 1)] == []
