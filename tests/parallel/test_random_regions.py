"""Dropout on ranks that share a layer: alike where they hold the same, unlike where they do not."""

from functools import partial
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

from minitron.launch import run
from minitron.model.recompute import apply_full_recompute, apply_selective_recompute
from minitron.model.transformer import materialized_attention
from minitron.parallel.tensor.layers import apply_tensor_parallel
from minitron.parallel.tensor.random_regions import rank_local_rng
from minitron.parallel.tensor.sequence import apply_sequence_parallel
from minitron.proof.oracle import small_model

B, S, V, RATE = 4, 12, 36, 0.5
PARALLEL = {"tensor": apply_tensor_parallel, "sequence": apply_sequence_parallel}
RECOMPUTE = {
    "none": (),
    "selective": (apply_selective_recompute,),
    "full": (apply_full_recompute,),
    "both": (apply_full_recompute, apply_selective_recompute),
}


def make(family, apply, group, recompute=(), recompute_first=False):
    torch.manual_seed(3)
    model = small_model(
        family,
        vocab_size=V,
        max_sequence_length=S,
        width=24,
        num_heads=6,
        num_kv_heads=6,
        ffn_width=36,
        dropout=RATE,
    )
    for block in model.blocks:
        block.attention.attention_fn = materialized_attention
    if recompute_first:
        for policy in recompute:
            policy(model)
    parallel = apply(model, group)
    if not recompute_first:
        for policy in recompute:
            policy(model)
    return model, parallel


def tokens():
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(0))


def recorded(masks):
    """F.dropout, which tells what it drops: (B, S, D) on the residual stream, else (B, H, S, S)."""
    plain = F.dropout

    def dropout(x, p=0.5, training=True, inplace=False):
        kept = plain(torch.ones_like(x), p, training)
        masks.append(kept > 0)
        return x * kept

    return dropout


def all_masks(group):
    """Of two forward passes, training and evaluation, and where the generators stand then."""
    done = {}
    for name, apply in PARALLEL.items():
        model, _ = make("gpt", apply, group)
        masks = []
        F.dropout, plain = recorded(masks), F.dropout
        try:
            for _ in range(2):
                model(tokens())
            state = torch.get_rng_state()
            model.eval()
            first, second = (model(tokens()) for _ in range(2))
        finally:
            F.dropout = plain
        done[name] = masks, state, torch.equal(first, second)
    return done


@pytest.fixture(scope="module")
def ranks():
    return run(all_masks, 3)


def split_by_region(masks):
    stream = [mask for mask in masks if mask.dim() == 3 and not mask.all()]
    attention = [mask for mask in masks if mask.dim() == 4 and not mask.all()]
    assert len(stream) == 2 * (1 + 2 * 2) and len(attention) == 2 * 2
    return stream, attention


@pytest.mark.parametrize("name", PARALLEL)
def test_the_residual_stream_is_dropped_alike_where_all_hold_it_and_heads_never_are(ranks, name):
    by_rank = [split_by_region(done[name][0]) for done in ranks]
    for (stream, attention), (other_stream, other_attention) in combinations(by_rank, 2):
        for mine, theirs in zip(stream, other_stream, strict=True):
            assert mine.shape == (B, S if name == "tensor" else S // 3, 24)
            assert torch.equal(mine, theirs) == (name == "tensor")
        for mine, theirs in zip(attention, other_attention, strict=True):
            assert mine.shape == (B, 2, S, S)
            assert not torch.equal(mine, theirs)
    for stream, attention in by_rank:
        for masks in (stream, attention):
            assert not any(torch.equal(a, b) for a, b in combinations(masks, 2))  # never the same
            for mask in masks:
                assert mask.double().mean() == pytest.approx(RATE, abs=0.1)


@pytest.mark.parametrize("name", PARALLEL)
def test_independent_masks_agree_on_half_of_their_values(ranks, name):
    """Not shifted or repeated numbers: neighboring ranks' masks are as good as unrelated."""
    by_rank = [split_by_region(done[name][0]) for done in ranks]
    for (stream, attention), (other_stream, other_attention) in combinations(by_rank, 2):
        pairs = list(zip(attention, other_attention, strict=True))
        if name == "sequence":
            pairs += zip(stream, other_stream, strict=True)
        for mine, theirs in pairs:
            assert (mine == theirs).double().mean() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("name", PARALLEL)
def test_afterwards_all_ranks_go_on_alike_and_an_evaluation_drops_nothing(ranks, name):
    for done in ranks:
        masks, state, same = done[name]
        assert torch.equal(state, ranks[0][name][1])
        assert same and sum(not mask.all() for mask in masks) == 14


# Recomputation changes no bit


def gradients(group):
    done = {}
    for name, apply in PARALLEL.items():
        for kind, policies in RECOMPUTE.items():
            for first in (False, True) if kind == "both" else (False,):
                model, parallel = make("llama", apply, group, policies, first)
                torch.manual_seed(7)
                losses = [parallel.summed_loss(model(tokens()), tokens()) for _ in range(2)]
                sum(losses).backward()  # two replays, in reverse order
                parallel.finish()
                done[name, kind, first] = (
                    torch.stack(losses).detach(),
                    {key: p.grad for key, p in model.named_parameters() if p.requires_grad},
                )
    return done


def test_recomputation_is_the_same_to_the_bit_under_dropout():
    for done in run(gradients, 2):
        for (name, kind, first), (losses, grads) in done.items():
            plain_losses, plain = done[name, "none", False]
            assert torch.equal(losses, plain_losses), (name, kind, first)
            assert losses[0] != losses[1]  # dropped otherwise
            for key, grad in grads.items():
                assert torch.equal(grad, plain[key]), (name, kind, first, key)


def test_own_numbers_differ_by_rank_and_leave_the_common_ones_alone():
    def draws(rank):
        torch.manual_seed(0)
        with rank_local_rng(rank, torch.device("cpu")):
            own = torch.rand(3)
        return own, torch.rand(3)

    (mine, after), (theirs, also) = map(draws, (0, 1))
    assert not torch.equal(mine, theirs) and torch.equal(after, also)
    assert not torch.equal(mine, after)
    assert torch.equal(draws(0)[0], mine)

    with pytest.raises(KeyError), rank_local_rng(0, torch.device("cpu")):
        raise KeyError
    torch.manual_seed(0)
    torch.randint(2**62, ())
    assert torch.equal(after, torch.rand(3))


def without_dropout(group, apply):
    model, _ = make("gpt", apply, group)
    for block in model.blocks:
        block.attention.dropout = 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    before = torch.get_rng_state()
    model(tokens())
    return torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("apply", PARALLEL.values(), ids=PARALLEL)
def test_without_dropout_no_number_is_drawn(apply):
    assert run(partial(without_dropout, apply=apply), 1) == [True]
