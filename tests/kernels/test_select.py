"""`select` and `select_chunks` against a sort of each row."""

import pytest
import torch

from kvcompress_kernels.select import reference, select, select_chunks

pytestmark = pytest.mark.gpu

ODD = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, 3e38, -1.0])


def ints(*x):
    return torch.tensor(x, dtype=torch.int32)


def rows(kind, count, width):
    torch.manual_seed(width)
    if kind == "random":
        return torch.randn(count, width)
    if kind == "ties":
        return torch.randint(0, 3, (count, width)).float() - 1
    return ODD[torch.randint(0, len(ODD), (count, width))]


def padded(kept, width):
    return [*kept, *[-1] * (width - len(kept))]


def top(row, keep):
    return sorted(reference.ranked(row)[: max(keep, 0)])


@pytest.mark.parametrize("kind", ["random", "ties", "odd"])
@pytest.mark.parametrize("width", [1, 37, 1500])
def test_rows_match_a_sort(kind, width):
    scores = rows(kind, 5, width)
    columns = ints(width, width, width // 2, 0, width)
    keep = ints(width // 3, width + 5, width // 4, 3, -1)
    none = torch.zeros_like(keep)
    got = select(scores, columns, keep, width)
    assert got.dtype == torch.int32
    assert torch.equal(got, reference.run(scores, columns, keep, width, none, none))


@pytest.mark.parametrize("kind", ["random", "ties", "odd"])
def test_first_and_last_columns_are_kept(kind):
    """They are kept before the best of the columns between them."""
    scores = rows(kind, 3, 60)
    columns, keep = ints(60, 60, 60), ints(20, 5, 2)
    num_first, num_last = ints(4, 4, 4), ints(6, 6, 6)
    got = select(scores, columns, keep, 30, num_first=4, num_last=num_last)
    assert torch.equal(got, reference.run(scores, columns, keep, 30, num_first, num_last))
    middle = [4 + j for j in top(scores[0, 4:54].tolist(), 10)]
    assert got[0].tolist() == padded([*range(4), *middle, *range(54, 60)], 30)
    assert got[1].tolist() == padded([0, 1, 2, 3, 59], 30)
    assert got[2].tolist() == padded([0, 1], 30)


@pytest.mark.parametrize("kind", ["random", "ties", "odd"])
@pytest.mark.parametrize("size", [1, 4, 10, 70])
@pytest.mark.parametrize("heads", [1, 2])
def test_chunks_match_a_sort(kind, size, heads):
    scores = rows(kind, 4, 61)
    groups = 4 // heads
    columns, keep = ints(61, 47, 61, 0)[:groups], ints(22, 13, 61, 5)[:groups]
    got = select_chunks(scores, columns, keep, 61, size=size, heads=heads)
    assert torch.equal(got, reference.chunks(scores, columns, keep, 61, size, heads))


@pytest.mark.parametrize("kind", ["random", "ties"])
@pytest.mark.parametrize("size", [1, 7])
def test_many_chunks_match_a_sort(kind, size):
    """Test more chunks than one tile of the kernel holds, above and below the threshold."""
    scores = rows(kind, 1, 2500)
    for keep in (300, 1801):
        got = select_chunks(scores, ints(2500), ints(keep), keep, size=size)
        want = reference.chunks(scores, ints(2500), ints(keep), keep, size, 1)
        assert torch.equal(got, want)


@pytest.mark.parametrize(("count", "width", "max_kept"), [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_no_rows_columns_or_positions(count, width, max_kept):
    scores, columns = torch.zeros(count, width), torch.full((count,), width, dtype=torch.int32)
    keep = torch.zeros(count, dtype=torch.int32)
    for got in (
        select(scores, columns, keep, max_kept, num_first=1, num_last=1),
        select_chunks(scores, columns, keep, max_kept, size=4),
    ):
        assert got.tolist() == [[-1] * max_kept] * count


def test_columns_past_a_row_are_ignored():
    """The buffer holds inf past each row's columns."""
    buffer = torch.full((3, 50), torch.inf)
    buffer[:, 5:25] = rows("random", 3, 20)
    scores, columns = buffer[:, 5:40], ints(20, 20, 20)
    want = [top(row, 8) for row in scores[:, :20].tolist()]
    assert select(scores, columns, ints(8, 8, 8), 8).tolist() == want
    assert select_chunks(scores, columns, ints(8, 8, 8), 8, size=1).tolist() == want


def test_max_kept_limits_the_positions():
    assert select(torch.arange(9.0)[None], ints(9), ints(7), 2).tolist() == [[7, 8]]


def test_columns_may_be_one_number_for_all_rows():
    scores = rows("ties", 4, 30)
    one, other = (select(scores, n, ints(7, 8, 9, 1), 9) for n in (25, ints(25, 25, 25, 25)))
    assert torch.equal(one, other)
    options = dict(size=4, heads=2)
    one, other = (select_chunks(scores, n, ints(7, 8), 9, **options) for n in (25, ints(25, 25)))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(2, 3, dtype=torch.float64)}, "scores must be float32"),
        ({"scores": torch.zeros(3, 2).T}, "rows of scores must have stride 1"),
        ({"columns": ints(3)}, r"columns must be \[2\]"),
        ({"keep": torch.tensor([1, 1])}, "keep must be int32"),
        ({"max_kept": -1}, "max_kept must not be negative"),
    ],
)
def test_arguments_are_checked(change, message):
    good = {"scores": torch.zeros(2, 3), "columns": ints(3, 3), "keep": ints(1, 1), "max_kept": 2}
    with pytest.raises(ValueError, match=message):
        select(**good | change)
