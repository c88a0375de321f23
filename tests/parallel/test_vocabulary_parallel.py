"""Loss and embedding of a divided vocabulary: PyTorch's numbers, and no rank sees all logits."""

from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.parallel.tensor.layers import apply_tensor_parallel
from minitron.parallel.tensor.sequence import apply_sequence_parallel
from minitron.parallel.tensor.vocabulary import vocabulary_parallel_cross_entropy
from minitron.proof.oracle import small_model
from minitron.pytorch.private import tensors_in
from tests.tiers import tiered

B, S, V = 3, 5, 24


def example(kind, dtype=torch.float64):
    """Logits (B, S, V) and targets (B, S)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B, S, V, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(V, (B, S), generator=generator)
    if kind == "ignored":
        targets[0, 1:] = targets[2, 3] = -100
    if kind == "none counts":
        targets[:] = -100
    if kind == "one rank has every target":
        targets %= 5
    if kind == "large":  # whose exponentials overflow, far apart
        logits *= 1e4
    return logits, targets


KINDS = ("plain", "ignored", "none counts", "one rank has every target", "large")


def losses(group):
    """Loss, the gradient of this rank's logits, and the calls, by kind and type."""
    done = {}
    for kind in KINDS:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            logits, targets = example(kind, dtype)
            shard = logits.chunk(group.size(), -1)[group.rank()].clone().requires_grad_()
            before = shard.detach().clone(), targets.clone()
            with Ledger() as ledger:
                loss = vocabulary_parallel_cross_entropy(shard, targets, group)
                num_forward = len(ledger.calls)
                (loss / 7).backward()
            assert torch.equal(shard, before[0]) and torch.equal(targets, before[1])
            calls = [(call.op, call.reduce, call.payload, call.dtype) for call in ledger.calls]
            done[kind, dtype] = loss.detach(), shard.grad, calls, num_forward
    return done


@pytest.fixture(scope="module", params=tiered([3, 1, 2, 4]), ids="{} ranks".format)
def ranks(request):
    return run(losses, request.param, watch=False)


def reference(kind, dtype):
    """PyTorch's own, from logits of `dtype`, computed in float32 or better."""
    logits, targets = example(kind, dtype)
    precise = logits.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    loss = F.cross_entropy(precise.flatten(0, 1), targets.flatten(), reduction="sum")
    (loss / 7).backward()
    return loss.detach(), precise.grad.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_pytorchs(ranks, kind, dtype):
    loss, grad = reference(kind, dtype)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-6}[dtype]
    for done in ranks:
        assert done[kind, dtype][0].shape == () and done[kind, dtype][0].dtype == loss.dtype
        assert torch.equal(done[kind, dtype][0], ranks[0][kind, dtype][0])
        torch.testing.assert_close(done[kind, dtype][0], loss, rtol=tolerance, atol=tolerance)
    ours = torch.cat([done[kind, dtype][1] for done in ranks], dim=-1)
    assert ours.dtype == dtype
    within = 2**-8 if dtype == torch.bfloat16 else tolerance  # the last bit may round otherwise
    torch.testing.assert_close(ours, grad, rtol=within, atol=tolerance)


def test_three_numbers_a_token_cross_the_wire_and_none_in_the_backward_pass(ranks):
    for done in ranks:
        for (_, dtype), (*_, calls, num_forward) in done.items():
            precise = torch.promote_types(dtype, torch.float32)
            tokens = B * S * precise.itemsize
            assert calls == [
                ("all_reduce", "max", tokens, precise),
                ("all_reduce", "sum", 2 * tokens, precise),
            ]
            assert num_forward == 2


# Nowhere is the whole


class Shapes(TorchDispatchMode):
    """Collects the shape of everything that an operator makes."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {tuple(tensor.shape) for tensor in tensors_in(out)}
        return out


VOCABULARY = 208  # larger than anything else, products of two dims included


def a_step(group, family, apply):
    model = small_model(
        family,
        vocab_size=VOCABULARY,
        max_sequence_length=8,
        width=24,
        num_heads=12,
        num_kv_heads=12,
        ffn_width=48,
    )
    parallel = apply(model, group)
    tokens = torch.randint(VOCABULARY, (B, 8), generator=torch.Generator().manual_seed(0))
    with Shapes() as shapes:
        parallel.summed_loss(model(tokens), tokens).backward()
    return shapes.seen, parallel.full_logits(model(tokens))


def test_no_tensor_of_a_step_has_the_whole_vocabulary():
    def steps(group):
        return [
            a_step(group, family, apply)
            for family in ("gpt", "llama")
            for apply in (apply_tensor_parallel, apply_sequence_parallel)
        ]

    for done in run(steps, 2):
        for shapes, whole in done:
            assert (B, 8, VOCABULARY // 2) in shapes
            assert VOCABULARY > max(max(shape, default=0) for shape in shapes)
            assert max(map(prod, shapes)) == B * 8 * VOCABULARY // 2  # a rank's own logits
            assert whole.shape == (B, 8, VOCABULARY)  # to draw tokens from, where asked for
            assert not whole.requires_grad


def looked_up(group):
    model = small_model("gpt", vocab_size=V, width=6, max_sequence_length=S)
    parallel = apply_tensor_parallel(model, group)
    whole = parallel.full_parameters()["token_embedding.weight"]
    tokens = torch.arange(V).view(2, -1)
    found = model.token_embedding(tokens)
    found.sum().backward()
    return torch.equal(found, whole[tokens]), model.token_embedding.weight.grad.unique().tolist()


def test_every_token_is_looked_up_on_the_rank_that_has_it():
    assert run(looked_up, 3) == 3 * [(True, [1.0])]
