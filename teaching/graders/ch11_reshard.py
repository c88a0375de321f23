"""Grader of 11.4: pieces are checked one by one, then a tensor is moved piece by piece."""

from collections.abc import Callable

import torch
from torch import Tensor

from teaching.graders import Mistake, asked, expect
from teaching.graders.ranks import per_rank

CASES = [(7, 2, 3), (12, 4, 2), (12, 2, 4), (12, 3, 3), (10, 4, 3), (9, 3, 4), (5, 4, 4), (3, 5, 2),
         (10, 1, 3), (10, 3, 1), (10, 6, 4), (2, 4, 8), (1, 1, 1), (97, 8, 6), (0, 2, 3)]
LARGE = 70_000_000_001, 48, 36
"""Too large for a loop over the elements."""


def grade_11_4(pieces: Callable) -> None:
    """Check the pieces, move a tensor, compare; then one of which only the pieces fit in memory."""
    for case in CASES:
        with asked("pieces(num_elements={}, num_old={}, num_new={})".format(*case)):
            answer = pieces(*case)
            _expect_pieces(answer, *case)
            _expect_moved(answer, *case)
            _expect_fewest(answer, *case)
    with asked("pieces(num_elements={}, num_old={}, num_new={})".format(*LARGE)):
        answer = pieces(*LARGE)
        _expect_pieces(answer, *LARGE)
        for rank, (mine, right) in enumerate(zip(answer, right_pieces(*LARGE), strict=True)):
            expect(mine == right, seen=f"rank {rank} copies {mine}, not {right}",
                   likely="small numbers work, so the likely cause is a float: divide with // "
                          "instead of /")


def shards(num_elements: int, num_ranks: int) -> list[range]:
    """The elements of each rank."""
    length = -(-num_elements // num_ranks)
    starts = [min(rank * length, num_elements) for rank in range(num_ranks)]
    return [range(start, min(start + length, num_elements)) for start in starts]


def right_pieces(num_elements: int, num_old: int, num_new: int) -> list[list[tuple]]:
    """By walking along both sets of shards at the same time."""
    old, answer = shards(num_elements, num_old), []
    for here in shards(num_elements, num_new):
        mine, position = [], here.start
        while position < here.stop:
            rank = next(r for r, there in enumerate(old) if position in there)
            stop = min(old[rank].stop, here.stop)
            mine.append((rank, *(range(position - shard.start, stop - shard.start)
                                 for shard in (old[rank], here))))
            position = stop
        answer.append(mine)
    return answer


def _expect_pieces(answer, num_elements: int, num_old: int, num_new: int) -> None:
    expect(isinstance(answer, list) and all(isinstance(mine, list) for mine in answer),
           seen=f"it returned {answer!r:.120}", likely="return a list that holds, for each new "
                                                       "rank, the list of its pieces")
    likely = "return one list per new rank, also an empty one for a rank without elements"
    if len(answer) == num_old:
        likely = "that is one list per old rank: list the pieces by the new rank, which reads them"
    expect(len(answer) == num_new, seen=f"{len(answer)} lists for {num_new} new ranks",
           likely=likely)
    for rank, piece in ((rank, piece) for rank, mine in enumerate(answer) for piece in mine):
        fits = isinstance(piece, tuple) and len(piece) == 3 and isinstance(piece[0], int) \
            and all(isinstance(part, range) and part.step == 1 for part in piece[1:])
        expect(fits, seen=f"new rank {rank} has the piece {piece!r:.80}",
               likely="a piece is (old rank, range there, range here)")
        expect(len(piece[1]) > 0, seen=f"new rank {rank} has the piece {piece}",
               likely="leave out a piece that has no elements")
        expect(len(piece[1]) == len(piece[2]), seen=f"new rank {rank} has the piece {piece}",
               likely="the two ranges must have the same length")
        expect(piece[0] in range(num_old), seen=f"new rank {rank} has the piece {piece}",
               likely=f"the old ranks are 0 to {num_old - 1}")
        _expect_inside(rank, piece, num_elements, num_old, num_new)


def _expect_inside(
    rank: int, piece: tuple, num_elements: int, num_old: int, num_new: int
) -> None:
    old_rank, there, here = piece
    old, new = shards(num_elements, num_old)[old_rank], shards(num_elements, num_new)[rank]
    for part, shard, whose in ((there, old, f"old rank {old_rank}"), (here, new, "it")):
        from_start = range(part.start - shard.start, part.stop - shard.start)
        likely = f"a shard has ceil({num_elements} / N) elements, the last ones what remains"
        if shard.start and 0 <= from_start.start and from_start.stop <= len(shard):
            likely = "both ranges count from the start of a shard: this one counts from the " \
                     "start of the tensor"
        expect(0 <= part.start and part.stop <= len(shard),
               seen=f"new rank {rank} has the piece {piece}, where {whose} has {len(shard)} "
                    f"element{'s' * (len(shard) != 1)}", likely=likely)


def _expect_moved(answer: list[list[tuple]], num_elements: int, num_old: int, num_new: int) -> None:
    """Move a tensor whose elements are their own numbers, and see what arrives."""
    whole = torch.arange(num_elements)
    saved = [whole[shard.start:shard.stop] for shard in shards(num_elements, num_old)]
    right = [whole[shard.start:shard.stop] for shard in shards(num_elements, num_new)]
    loaded = [torch.full_like(shard, -1) for shard in right]
    num_written = [torch.zeros_like(shard) for shard in right]
    for rank, (old_rank, there, here) in ((r, piece) for r, m in enumerate(answer) for piece in m):
        loaded[rank][here.start:here.stop] = saved[old_rank][there.start:there.stop]
        num_written[rank][here.start:here.stop] += 1

    texts = [_arrived(*row) for row in zip(loaded, right, num_written, strict=True)]
    likely = "element i of the tensor must arrive as element i: in which old shard is it, and " \
             "where?"
    num_right = [len(mine) for mine in right_pieces(num_elements, num_old, num_new)]
    if any("never" in text for text in texts) and [len(mine) for mine in answer] == num_right:
        likely = "a range excludes its stop: the stop is one more than the last element"
    elif any("never" in text for text in texts):
        likely = "every old shard that overlaps the new one gives a piece, the short last one too"
    elif any("times" in text for text in texts):
        likely = "the next piece starts where the one before it stops"
    expect(all(text == "right" for text in texts), seen=per_rank(texts), likely=likely)


def _arrived(loaded: Tensor, right: Tensor, num_written: Tensor) -> str:
    for place, count in enumerate(num_written.tolist()):
        if count != 1:
            return f"element {place} is " + (f"written {count} times" if count else "never written")
        if loaded[place] != right[place]:
            return f"element {place} is {loaded[place]} of the tensor, not {right[place]}"
    return "right"


def _expect_fewest(
    answer: list[list[tuple]], num_elements: int, num_old: int, num_new: int
) -> None:
    right = right_pieces(num_elements, num_old, num_new)
    for rank, (mine, best) in enumerate(zip(answer, right, strict=True)):
        expect(len(mine) == len(best), seen=f"new rank {rank} has {len(mine)} pieces: {mine}",
               likely=f"{len(best)} would do: what comes from one old shard is one piece")
        if mine != best:
            raise Mistake(f"new rank {rank} has its pieces in the order {mine}",
                          "list the pieces in the order of the elements")
