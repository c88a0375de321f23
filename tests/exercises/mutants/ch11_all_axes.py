"""Right answers written differently, and wrong ones with what the graders must say of them.

A docstring states the idea behind the answer.
"""

from itertools import product
from math import prod

import numpy
import torch
import torch.distributed as dist

# 11.1


def all_places(axes):
    return [dict(zip(axes, place, strict=True)) for place in product(*map(range, axes.values()))]


def refuse(number, size):
    if number not in range(size):
        raise ValueError(f"{number} is outside of 0 to {size} (exclusive)")


def right_by_list(rank, axes):
    """All places in the order of the ranks."""
    refuse(rank, prod(axes.values()))
    return all_places(axes)[rank]


def right_by_strides(rank, axes):
    """Each axis by itself: divide by what lies behind, take the rest."""
    refuse(rank, prod(axes.values()))
    sizes, names = list(axes.values()), list(axes)
    return {name: rank // prod(sizes[i + 1 :]) % sizes[i] for i, name in enumerate(names)}


def first_fastest(rank, axes):
    """The first axis comes first: it is the one that varies."""
    refuse(rank, prod(axes.values()))
    place = {}
    for axis, size in axes.items():
        rank, place[axis] = divmod(rank, size)
    return place


def rest_alone(rank, axes):
    """The place along an axis is the rest of its size: that of what is left."""
    refuse(rank, prod(axes.values()))
    return {axis: rank % size for axis, size in axes.items()}


def own_size_as_stride(rank, axes):
    """Divides by the axis's own size: not by those behind it."""
    refuse(rank, prod(axes.values()))
    return {axis: rank // size % size for axis, size in axes.items()}


def never_rests(rank, axes):
    """The quotient by what lies behind: also of what lies before."""
    refuse(rank, prod(axes.values()))
    sizes = list(axes.values())
    return {axis: rank // prod(sizes[i + 1 :]) for i, axis in enumerate(axes)}


def from_one(rank, axes):
    """The first place is number 1."""
    return {axis: place + 1 for axis, place in right_by_list(rank, axes).items()}


def three_names(rank, axes):
    """A grid is pp x dp x tp."""
    refuse(rank, prod(axes.values()))
    dp, tp = axes.get("dp", 1), axes.get("tp", 1)
    return {"pp": rank // (dp * tp), "dp": rank // tp % dp, "tp": rank % tp}


def a_tuple(rank, axes):
    """The places, in order: of which axes?"""
    return tuple(right_by_list(rank, axes).values())


def wraps_around(rank, axes):
    """Rank N is rank 0 again, as rest and quotient say."""
    return right_by_list(rank % prod(axes.values()), axes)


def one_too_many(rank, axes):
    """There are N ranks, so N is allowed."""
    if rank < 0 or rank > prod(axes.values()):
        raise ValueError(f"{rank} is not one of {prod(axes.values())}")
    return (all_places(axes) + [None])[rank]


def floats(rank, axes):
    """The rest, divided: a float."""
    return {axis: place / 1 for axis, place in right_by_list(rank, axes).items()}


def numpys(rank, axes):
    """NumPy knows it: in numbers of its own."""
    refuse(rank, prod(axes.values()))
    return dict(zip(axes, numpy.unravel_index(rank, tuple(axes.values())), strict=True))


def without_numbers(rank, axes):
    """An error is an error."""
    if rank not in range(prod(axes.values())):
        raise ValueError("no such rank")
    return right_by_list(rank, axes)


def right_by_search(place, axes):
    """The inverse, found by looking."""
    for axis, size in axes.items():
        refuse(place[axis], size)
    return all_places(axes).index(place)


def right_by_products(place, axes):
    """Each place times the ranks behind."""
    for axis, size in axes.items():
        refuse(place[axis], size)
    sizes = list(axes.values())
    return sum(place[axis] * prod(sizes[i + 1 :]) for i, axis in enumerate(axes))


def first_fastest_back(place, axes):
    """The first axis is counted in ones."""
    rank = 0
    for axis, size in reversed(axes.items()):
        refuse(place[axis], size)
        rank = rank * size + place[axis]
    return rank


def order_of_place(place, axes):
    """Axis after axis as they come in the place."""
    rank = 0
    for axis, where in place.items():
        refuse(where, axes[axis])
        rank = rank * axes[axis] + where
    return rank


def own_sizes(place, axes):
    """Each place times the axis's size."""
    for axis, size in axes.items():
        refuse(place[axis], size)
    return sum(place[axis] * size for axis, size in axes.items())


def adds_places(place, axes):
    """Steps along the axes add up."""
    for axis, size in axes.items():
        refuse(place[axis], size)
    return sum(place.values())


def checks_the_rank(place, axes):
    """A rank in the grid is a place in the grid: two places can have one rank then."""
    sizes = list(axes.values())
    rank = sum(place[axis] * prod(sizes[i + 1 :]) for i, axis in enumerate(axes))
    refuse(rank, prod(sizes))
    return rank


def size_is_a_place(place, axes):
    """There are `size` places, so `size` is allowed."""
    for axis, size in axes.items():
        refuse(place[axis], size + 1)
    return right_by_products({axis: min(place[axis], axes[axis] - 1) for axis in axes}, axes)


# 11.2


def right_by_remainder(axis, axes):
    """Ranks with the same places along all other axes."""
    together = {}
    for rank, place in enumerate(all_places(axes)):
        together.setdefault(str(place | {axis: None}), []).append(rank)
    return sorted(together.values())


def right_by_reshape(axis, axes):
    """As device meshes do: the axis last, then rows."""
    ranks = torch.arange(prod(axes.values())).view(*axes.values())
    rows = ranks.movedim(list(axes).index(axis), -1).reshape(-1, axes[axis])
    return rows.tolist()


def always_neighbors(axis, axes):
    """A group is as many neighbors as the axis is long."""
    size = axes[axis]
    return [list(range(first, first + size)) for first in range(0, prod(axes.values()), size)]


def same_place(axis, axes):
    """The ranks at the same place along the axis: they differ along the others."""
    groups = [[] for _ in range(axes[axis])]
    for rank, place in enumerate(all_places(axes)):
        groups[place[axis]].append(rank)
    return groups


def grid_backwards(axis, axes):
    """The first axis varies fastest."""
    return right_by_remainder(axis, {name: axes[name] for name in reversed(axes)})


def far_apart(axis, axes):
    """Strided by the number of groups: so they are as far apart as can be."""
    num_groups = prod(axes.values()) // axes[axis]
    return [list(range(first, prod(axes.values()), num_groups)) for first in range(num_groups)]


def first_group_alone(axis, axes):
    """The group of rank 0."""
    return right_by_remainder(axis, axes)[:1]


def unordered(axis, axes):
    """A group is a group, in any order."""
    return right_by_remainder(axis, axes)[::-1]


def ends_with_an_empty_group(axis, axes):
    """One group too many: with nobody in it."""
    return [*right_by_remainder(axis, axes), []]


def right_by_cases(event, zero, sequence):
    """Axis by axis."""
    axes = set()
    if event not in ("clip", "weights") or zero == 1:
        axes.add("dp")
    if event in {"embedding", "clip", "loss"}:
        axes.add("pp")
    if event == "clip" or (event, sequence) == ("norm", True):
        axes.add("tp")
    return frozenset(axes)


def clip_over_all(event, zero, sequence):
    """The norm of the whole model's gradient is a sum over all ranks."""
    return {"pp", "dp", "tp"} if event == "clip" else right_by_cases(event, zero, sequence)


def clip_forgets_pp(event, zero, sequence):
    """A stage clips its own gradients."""
    right = right_by_cases(event, zero, sequence)
    return right - {"pp"} if event == "clip" else right


def clip_forgets_zero(event, zero, sequence):
    """Averaged gradients are the same along dp: not with ZeRO."""
    return right_by_cases(event, 0 if event == "clip" else zero, sequence)


def norms_always_over_tp(event, zero, sequence):
    """The copies of a norm's weight must stay the same: they do by themselves."""
    return right_by_cases(event, zero, True)


def norms_never_over_tp(event, zero, sequence):
    """A norm is not cut, so it has nothing to do with tp: its tokens are."""
    return right_by_cases(event, zero, False)


def embedding_untied(event, zero, sequence):
    """It is a parameter like any other."""
    right = right_by_cases(event, zero, sequence)
    return right - {"pp"} if event == "embedding" else right


def loss_over_tp(event, zero, sequence):
    """All ranks have a loss: along tp the same one."""
    right = right_by_cases(event, zero, sequence)
    return right | {"tp"} if event == "loss" else right


def loss_of_own_samples(event, zero, sequence):
    """The loss travels from the last stage to the first."""
    return {"pp"} if event == "loss" else right_by_cases(event, zero, sequence)


def matrices_over_tp(event, zero, sequence):
    """Ranks of tp compute a layer together, so its gradient is their sum."""
    return {"dp", "tp"} if event == "matrix" else right_by_cases(event, zero, sequence)


def weights_stay(event, zero, sequence):
    """All ranks update alike: not if each has its own shard."""
    return set() if event == "weights" else right_by_cases(event, zero, sequence)


def a_list(event, zero, sequence):
    """Their names in a list."""
    return sorted(right_by_cases(event, zero, sequence))


def over(square, axes, groups):
    for axis in axes:
        dist.all_reduce(square, group=groups[axis])
    return square


def needed(zero):
    return ("tp", "pp", "dp")[: 2 + zero]


def squares(gradients, copies):
    total = torch.zeros(())
    for name, gradient in gradients.items():
        total += gradient.square().sum() / copies(name)
    return total


def right_first_copy(gradients, cut, zero, groups):
    """The first rank of tp counts the copies, the others leave them out."""
    first = groups["tp"].rank() == 0
    mine = [g.double().norm() ** 2 for name, g in gradients.items() if first or name in cut]
    return over(sum(mine, torch.zeros((), dtype=torch.float64)), needed(zero), groups).sqrt()


def right_only_where_there_are_others(gradients, cut, zero, groups):
    """No message over an axis of one rank; two numbers in one message."""
    both = torch.zeros(2)
    for name, gradient in gradients.items():
        both[int(name in cut)] += gradient.norm() ** 2
    over(both, [axis for axis in needed(zero) if groups[axis].size() > 1], groups)
    return (both[0] / groups["tp"].size() + both[1]).sqrt()


def counts_copies(gradients, cut, zero, groups):
    """Each rank's squares, added up: copies too."""
    return over(squares(gradients, lambda name: 1), needed(zero), groups).sqrt()


def divides_all(gradients, cut, zero, groups):
    """Summed over tp, so divided by tp."""
    tp = groups["tp"].size()
    return over(squares(gradients, lambda name: tp), needed(zero), groups).sqrt()


def divides_the_cut(gradients, cut, zero, groups):
    """What is cut is divided by tp: it is divided already."""
    tp = groups["tp"].size()
    return over(
        squares(gradients, lambda name: tp if name in cut else 1), needed(zero), groups
    ).sqrt()


def divides_the_norm(gradients, cut, zero, groups):
    """Divides a copy's gradient by their number, then squares it."""
    tp = groups["tp"].size()
    return over(
        squares(gradients, lambda name: 1 if name in cut else tp * tp), needed(zero), groups
    ).sqrt()


def without_root(gradients, cut, zero, groups):
    """The sum of the squares."""
    return right_first_copy(gradients, cut, zero, groups) ** 2


def adds_norms(gradients, cut, zero, groups):
    """The norm is the sum of the ranks' norms."""
    tp = groups["tp"].size()
    own = squares(gradients, lambda name: 1 if name in cut else tp).sqrt()
    return over(own, needed(zero), groups)


def forgets_stages(gradients, cut, zero, groups):
    """All parameters of this rank, over the ranks that have parts of them."""
    tp = groups["tp"].size()
    axes = [axis for axis in needed(zero) if axis != "pp"]
    return over(squares(gradients, lambda name: 1 if name in cut else tp), axes, groups).sqrt()


def forgets_shards(gradients, cut, zero, groups):
    """Gradients are the same along dp."""
    tp = groups["tp"].size()
    return over(squares(gradients, lambda name: 1 if name in cut else tp), needed(0), groups).sqrt()


def over_dp_too(gradients, cut, zero, groups):
    """Over all axes, to be on the safe side; then divided by the number of the same."""
    tp, dp = groups["tp"].size(), 1 if zero else groups["dp"].size()
    total = squares(gradients, lambda name: dp if name in cut else dp * tp)
    return over(total, needed(1), groups).sqrt()


def all_ranks(gradients, cut, zero, groups):
    """One sum over all ranks; the same ones are divided out."""
    tp, dp = groups["tp"].size(), 1 if zero else groups["dp"].size()
    total = squares(gradients, lambda name: dp if name in cut else dp * tp)
    dist.all_reduce(total)
    return total.sqrt()


def each_by_itself(gradients, cut, zero, groups):
    """Parameter by parameter: the cut ones are summed over tp."""
    total = torch.zeros(())
    for name, gradient in gradients.items():
        square = gradient.square().sum()
        if name in cut:
            over(square, ["tp"], groups)
        total += square
    return over(total, needed(zero)[1:], groups).sqrt()


def squares_in_place(gradients, cut, zero, groups):
    """No memory for the squares: their place is that of the gradients."""
    for gradient in gradients.values():
        gradient.square_()
    tp = groups["tp"].size()
    own = sum(
        (g.sum() / (1 if name in cut else tp) for name, g in gradients.items()), torch.zeros(())
    )
    return over(own, needed(zero), groups).sqrt()


def a_list_of_one(gradients, cut, zero, groups):
    """One number, in a list."""
    return right_first_copy(gradients, cut, zero, groups)[None]


def nothing_to_add(gradients, cut, zero, groups):
    """A rank without gradients has nothing to say."""
    if not gradients:
        return torch.zeros(())
    return right_first_copy(gradients, cut, zero, groups)


# 11.3


def divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


def possible(model, num_gpus, gpus_per_node, batch_size, leave_out=""):
    """All (dp, tp, pp, zero) that fulfil the conditions but those left out, in the tree's order."""
    kept = []
    for tp, pp in product(divisors(num_gpus), repeat=2):
        dp = num_gpus // (tp * pp)
        conditions = {
            "kv heads": model.num_kv_heads % tp == 0,
            "ffn": model.ffn_width % tp == 0,
            "node": gpus_per_node % tp == 0 or gpus_per_node >= num_gpus,
            "layers": model.num_layers % pp == 0,
            "batch": dp > 0 and batch_size % dp == 0,
            "product": dp * tp * pp == num_gpus,
        }
        if all(holds for name, holds in conditions.items() if name != leave_out):
            kept += [
                (dp, tp, pp, zero)
                for zero in range(4)
                if (zero == 0 or dp > 1) and (zero < 2 or pp == 1)
            ]
    return kept


def fitting(found, needed, most):
    return [layout for layout in found if needed(*layout) <= most]


def right_three_loops(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed):
    """Tries them all, sorts in the end."""
    found = []
    for dp, tp in product(range(1, num_gpus + 1), repeat=2):
        pp, rest = divmod(num_gpus, dp * tp)
        whole = [model.num_kv_heads % tp, model.ffn_width % tp, rest]
        if any(whole) or pp == 0 or model.num_layers % pp or batch_size % dp:
            continue
        nodes = [
            {rank // gpus_per_node for rank in range(first, first + tp)}
            for first in range(0, num_gpus, tp)
        ]
        if max(map(len, nodes)) > 1:
            continue
        highest = 0 if dp == 1 else 1 if pp > 1 else 3
        found += [(dp, tp, pp, zero) for zero in range(highest + 1)]
    found = fitting(found, bytes_needed, bytes_per_gpu)
    return sorted(found, key=lambda layout: layout[1:])


def right_filtered(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed):
    """A list of conditions."""
    found = possible(model, num_gpus, gpus_per_node, batch_size)
    return fitting(found, bytes_needed, bytes_per_gpu)


def powers_of_two(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed):
    """Sizes are powers of two: on most clusters."""
    found = possible(model, num_gpus, gpus_per_node, batch_size)
    found = [layout for layout in found if not any(n & (n - 1) for n in layout[:3])]
    return fitting(found, bytes_needed, bytes_per_gpu)


def smaller_than_a_node(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed):
    """tp stays in a node if it is not larger than one: neighbors may lie on two."""
    found = possible(model, num_gpus, gpus_per_node, batch_size, "node")
    found = [layout for layout in found if layout[1] <= gpus_per_node]
    return fitting(found, bytes_needed, bytes_per_gpu)


def node_always_divides(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed):
    """tp divides the GPUs of a node: of a full one."""
    found = possible(model, num_gpus, gpus_per_node, batch_size)
    found = [layout for layout in found if gpus_per_node % layout[1] == 0]
    return fitting(found, bytes_needed, bytes_per_gpu)


def without(condition):
    def layouts(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed):
        found = possible(model, num_gpus, gpus_per_node, batch_size, condition)
        return fitting(found, bytes_needed, bytes_per_gpu)

    layouts.__name__ = f"without_{condition.replace(' ', '_')}"
    layouts.__doc__ = f"Does not ask for the {condition}."
    return layouts


def less_than(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed):
    """Less than there is."""
    found = possible(model, num_gpus, gpus_per_node, batch_size)
    return [layout for layout in found if bytes_needed(*layout) < bytes_per_gpu]


def first_alone(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed):
    """The one that cuts least is what is wanted."""
    return right_filtered(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed)[
        :1
    ]


def most_data_parallel(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed):
    """Data parallelism sends least: the largest dp first."""
    found = right_filtered(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed)
    return sorted(found, key=lambda layout: (-layout[0], layout[2], layout[3]))


def lowest_stage_alone(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed):
    """A higher stage of ZeRO than is needed is none."""
    found = right_filtered(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed)
    return [layout for layout in found if (*layout[:3], layout[3] - 1) not in found]


def all_stages(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed):
    """Each layout with each stage."""
    found = possible(model, num_gpus, gpus_per_node, batch_size)
    found = [(*layout[:3], zero) for layout in found if layout[3] == 0 for zero in range(4)]
    return fitting(found, bytes_needed, bytes_per_gpu)


def asks_first(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed):
    """First what fits, then what can be cut."""
    found = right_filtered(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed)
    for layout in possible(model, num_gpus, gpus_per_node, batch_size, "layers"):
        bytes_needed(*layout)
    return found


def other_order(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed):
    """tp, dp, pp, zero: as they are chosen."""
    found = possible(model, num_gpus, gpus_per_node, batch_size)
    return [
        layout
        for layout in found
        if bytes_needed(layout[1], layout[0], *layout[2:]) <= bytes_per_gpu
    ]


# 11.4


def cuts(num_elements, size, length=None):
    length = length or -(-num_elements // size)
    return [
        (min(r * length, num_elements), min(r * length + length, num_elements)) for r in range(size)
    ]


def overlaps(num_elements, old, new):
    """(old rank, start, stop) in the whole tensor, for each new rank."""
    found = [
        [(rank, max(here[0], there[0]), min(here[1], there[1])) for rank, there in enumerate(old)]
        for here in new
    ]
    return [[piece for piece in mine if piece[1] < piece[2]] for mine in found]


def shifted(num_elements, old, new, there=True, here=True):
    return [
        [
            (
                rank,
                range(a - old[rank][0] * there, b - old[rank][0] * there),
                range(a - new[number][0] * here, b - new[number][0] * here),
            )
            for rank, a, b in mine
        ]
        for number, mine in enumerate(overlaps(num_elements, old, new))
    ]


def right_by_overlap(num_elements, num_old, num_new):
    """Overlaps of intervals."""
    return shifted(num_elements, cuts(num_elements, num_old), cuts(num_elements, num_new))


def right_by_walking(num_elements, num_old, num_new):
    """Along the tensor, from cut to cut of either kind."""
    old, new = -(-num_elements // num_old), -(-num_elements // num_new)
    answer, position = [[] for _ in range(num_new)], 0
    while position < num_elements:
        (a, there), (b, here) = divmod(position, old), divmod(position, new)
        count = min(old - there, new - here, num_elements - position)
        answer[b].append((a, range(there, there + count), range(here, here + count)))
        position += count
    return answer


def rounded_down(num_elements, num_old, num_new):
    """n / N elements each: what is left belongs to nobody."""
    old, new = (
        cuts(num_elements, size, max(1, num_elements // size)) for size in (num_old, num_new)
    )
    return shifted(num_elements, old, new)


def places_in_the_tensor(num_elements, num_old, num_new):
    """Ranges of the tensor: not of the shards."""
    return shifted(
        num_elements, cuts(num_elements, num_old), cuts(num_elements, num_new), False, False
    )


def there_in_the_tensor(num_elements, num_old, num_new):
    """Where it lies is where it lies in the tensor."""
    return shifted(num_elements, cuts(num_elements, num_old), cuts(num_elements, num_new), False)


def here_in_the_tensor(num_elements, num_old, num_new):
    """Where it goes is where it goes in the tensor."""
    return shifted(
        num_elements, cuts(num_elements, num_old), cuts(num_elements, num_new), here=False
    )


def keeps_empty_ones(num_elements, num_old, num_new):
    """A piece of every old rank, of some an empty one."""
    return [
        [
            next((p for p in mine if p[0] == rank), (rank, range(0), range(0)))
            for rank in range(num_old)
        ]
        for mine in right_by_overlap(num_elements, num_old, num_new)
    ]


def one_by_one(num_elements, num_old, num_new):
    """Element by element."""
    if num_elements > 10**6:
        return []
    return [
        [
            (rank, there[i : i + 1], here[i : i + 1])
            for rank, there, here in mine
            for i in range(len(there))
        ]
        for mine in right_by_overlap(num_elements, num_old, num_new)
    ]


def stop_included(num_elements, num_old, num_new):
    """From the start to the stop: but a range ends before it."""
    return [
        [
            (rank, range(there.start, there.stop - 1), range(here.start, here.stop - 1))
            if len(there) > 1
            else (rank, there, here)
            for rank, there, here in mine
        ]
        for mine in right_by_overlap(num_elements, num_old, num_new)
    ]


def for_the_old_ranks(num_elements, num_old, num_new):
    """Whom each old rank sends to."""
    return shifted(num_elements, cuts(num_elements, num_new), cuts(num_elements, num_old))


def first_shard_alone(num_elements, num_old, num_new):
    """What lies where the new shard begins, as if a new one lay in one old one."""
    return [mine[:1] for mine in right_by_overlap(num_elements, num_old, num_new)]


def backwards(num_elements, num_old, num_new):
    """In any order."""
    return [mine[::-1] for mine in right_by_overlap(num_elements, num_old, num_new)]


# 11.5


def grid(dp, tp, pp, zero, **change):
    """A layout whose activations are as few as can be."""
    return {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "zero": zero,
        "sequence": tp > 1,
        "recompute": "full",
        "micro_batch_size": 1,
    } | change


def right_weights_divided():
    """No pipeline, and the weights divided too."""
    return grid(4, 2, 1, 3)


def right_longest_pipeline():
    """A layer for each stage."""
    return grid(1, 2, 4, 0, sequence=False)


def data_parallel_alone():
    """ZeRO divides all there is: but for one sequence's activations."""
    return grid(8, 1, 1, 3)


def state_alone():
    """ZeRO-3 and tensor parallelism divide the state: activations come on top."""
    return grid(4, 2, 1, 3, recompute="none")


def pipeline_alone():
    """Four stages have a fourth of everything: the first of them four micro-batches."""
    return grid(2, 1, 4, 1)


def without_zero():
    """A fourth of the model on each rank, recomputed: with all its moments."""
    return grid(2, 2, 2, 0)


def whole_share():
    """A rank's sequences in one go."""
    return grid(2, 2, 2, 1, micro_batch_size=4)


def as_many_as_there_are():
    """Each layer over all ranks."""
    return grid(1, 8, 1, 0)


def four_ranks():
    """2 x 2 is 4."""
    return grid(2, 2, 1, 3)


def sequence_of_one():
    """Sequence parallelism without tensor parallelism."""
    return grid(4, 1, 2, 1, sequence=True)


def forgets_a_key():
    """What is not needed is left out."""
    return {key: value for key, value in grid(4, 2, 1, 3).items() if key != "pp"}


def in_other_words():
    """Recomputation is on."""
    return grid(2, 2, 2, 1, recompute=True)


# What once passed


def pops_axes(rank, axes):
    """Takes the axes out of the dict, from the last one on: it is the caller's."""
    place = right_by_strides(rank, axes)
    axes.clear()
    return place


def pops_places(place, axes):
    """Takes the places out of the dict: it is the caller's."""
    rank = right_by_products(place, axes)
    place.clear()
    return rank


def pops_the_axis(axis, axes):
    """Takes the axis out of the dict: it is the caller's."""
    groups = right_by_remainder(axis, axes)
    axes.pop(axis)
    return groups


def flat_views(gradients, cut, zero, groups):
    """Flattens by view: what is contiguous."""
    flat = {name: gradient.view(-1) for name, gradient in gradients.items()}
    return right_first_copy(flat, cut, zero, groups)


def empties_the_set(gradients, cut, zero, groups):
    """Takes the names out of the set that are done: it is the caller's."""
    norm = right_first_copy(gradients, cut, zero, groups)
    cut.clear()
    return norm


def eight_at_most(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed):
    """A node has eight GPUs: some have more."""
    found = right_filtered(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed)
    return [layout for layout in found if layout[1] <= 8]


def sixteen_stages_at_most(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed):
    """Nobody has more stages than 16: some do."""
    found = right_filtered(model, num_gpus, gpus_per_node, batch_size, bytes_per_gpu, bytes_needed)
    return [layout for layout in found if layout[2] <= 16]


RIGHT_ANSWERS = {
    "place_of": [right_by_list, right_by_strides],
    "rank_at": [right_by_search, right_by_products],
    "groups_along": [right_by_remainder, right_by_reshape],
    "axes_of": [right_by_cases],
    "gradient_norm": [right_first_copy, right_only_where_there_are_others],
    "layouts": [right_three_loops, right_filtered],
    "pieces": [right_by_overlap, right_by_walking],
    "layout": [right_longest_pipeline, right_weights_divided],
}

MISTAKES = {
    "place_of": {
        first_fastest: "first axis varies fastest",
        wraps_around: "13 is outside 0 to 11",
        rest_alone: "one step along an axis skips",
        own_size_as_stride: "not by the axis's own size",
        never_rests: "less than the axis's size",
        from_one: "numbered from 0",
        three_names: "the axes here are dp, tp",
        a_tuple: "a dict from the name",
        floats: "divide with //",
        one_too_many: "12 is outside 0 to 11",
        without_numbers: "both numbers, 13 and 12",
        pops_axes: "belongs to the caller",
    },
    "rank_at": {
        first_fastest_back: "first axis varies fastest",
        checks_the_rank: "2 is outside 0 to 1",
        order_of_place: "whatever the order of `place`",
        own_sizes: "not by the axis's own size",
        adds_places: "skips as many ranks as the product of the axes after it",
        size_is_a_place: "2 is outside 0 to 1",
        pops_places: "belongs to the caller",
    },
    "groups_along": {
        always_neighbors: "neighbors only if no axis comes after dp",
        same_place: "a group has one rank of each place",
        grid_backwards: "first axis varies fastest",
        far_apart: "the product of the axes after this one",
        first_group_alone: "each rank is in exactly one group",
        unordered: "sort the ranks of each group",
        ends_with_an_empty_group: "one group is empty: each has",
        pops_the_axis: "belongs to the caller",
    },
    "axes_of": {
        norms_never_over_tp: "has seen only its part of the tokens",
        clip_over_all: "a sum would count each dp times",
        clip_forgets_pp: "the other stages' gradients count too",
        clip_forgets_zero: "the averaged gradient of its own shard only",
        norms_always_over_tp: "tp times too large",
        embedding_untied: "add the two",
        loss_over_tp: "a sum would count it tp times",
        loss_of_own_samples: "the batch is all of these",
        matrices_over_tp: "the full gradient of that shard",
        weights_stay: "has updated only its own shard",
        a_list: "a set of names",
    },
    "gradient_norm": {
        counts_copies: "so they count 2 times",
        over_dp_too: "a sum would count each dp times",
        divides_all: "you also divide the sharded gradients",
        divides_the_norm: "not the gradients themselves",
        without_root: "that is the square of the norm",
        adds_norms: "norms do not add up",
        forgets_stages: "the other stages' gradients count too",
        forgets_shards: "the averaged gradient of its own shard only",
        all_ranks: "without group=groups",
        each_by_itself: "add up the squares on the rank first",
        nothing_to_add: "every rank must make the same calls",
        flat_views: "view size is not compatible",
        empties_the_set: "remove nothing from the dict or the set",
    },
    "layouts": {
        smaller_than_a_node: "spans two nodes of 8",
        asks_first: "check the other conditions first",
        powers_of_two: "need not be powers of two",
        node_always_divides: "are in one node",
        without("kv heads"): "does not divide the 4 key-value heads",
        without("layers"): "does not divide the 2 layers",
        without("batch"): "does not divide the batch of 6",
        less_than: "exactly the bytes that a GPU has",
        first_alone: "not only the first",
        most_data_parallel: "sort by tp",
        all_stages: "a pipeline allows 0 and 1 only",
        eight_at_most: "tp may be as large as the node",
        sixteen_stages_at_most: "there is no upper limit on a size",
    },
    "pieces": {
        places_in_the_tensor: "counts from the start of the tensor",
        rounded_down: "ceil(7 / N) elements",
        there_in_the_tensor: "counts from the start of the tensor",
        here_in_the_tensor: "counts from the start of the tensor",
        keeps_empty_ones: "leave out a piece",
        one_by_one: "what comes from one old shard is one piece",
        stop_included: "a range excludes its stop",
        for_the_old_ranks: "by the new rank, which reads them",
        first_shard_alone: "every old shard that overlaps",
        backwards: "in the order of the elements",
    },
    "layout": {
        pipeline_alone: "the largest part is activation",
        as_many_as_there_are: "num_heads = 2 is not divisible by 8 ranks",
        data_parallel_alone: "over 1.15 MB at the peak of a step: rank",
        state_alone: "the largest part is activation",
        without_zero: "the largest part is optimizer state",
        whole_share: "over 1.15 MB at the peak of a step: rank",
        four_ranks: "the number of ranks, 8",
        sequence_of_one: "parallel.sequence with parallel.tp = 1",
        forgets_a_key: "missing or unknown is pp",
        in_other_words: "recompute is",
    },
}

FURTHER = {
    "place_of": {
        numpys: "it returned an object of type numpy.int64",
    },
    "gradient_norm": {
        divides_the_cut: "not those of sharded ones",
        squares_in_place: "the call modified the gradients",
        a_list_of_one: "a tensor of shape ()",
    },
    "layouts": {
        without("ffn"): "the feed-forward width, 42",
        lowest_stage_alone: "a higher one sends more",
        other_order: "in this order",
    },
}
"""More mistakes than the usual eleven, where there are as many."""
