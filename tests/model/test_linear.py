"""A linear layer of which parts are changed: the same values, later, or in 8 bits."""

import pytest
import torch
from torch import nn

from minitron.model.linear import Linear, accumulate_all, apply_deferred_weight_gradients

IN, OUT = 5, 3


def pair(bias=True, weight_frozen=False, bias_frozen=False):
    """The same layer twice, the second one deferred."""
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = nn.Linear(IN, OUT, bias=bias, dtype=torch.float64)
        layer.weight.requires_grad_(not weight_frozen)
        if bias:
            layer.bias.requires_grad_(not bias_frozen)
        layers.append(layer)
    return *layers, apply_deferred_weight_gradients(layers[1])


def micro_batch(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, IN, generator=generator, dtype=torch.float64)


def through(layer, x):
    """Output, and the gradient of the input of a loss that is not linear."""
    x = x.clone().requires_grad_()
    out = layer(x)
    (out**2).sum().backward()
    return out.detach(), x.grad


def gradients(layer):
    return [parameter.grad for parameter in layer.parameters()]


CASES = {
    "bias": {},
    "no bias": {"bias": False},
    "frozen weight": {"weight_frozen": True},
    "frozen bias": {"bias_frozen": True},
    "all frozen": {"weight_frozen": True, "bias_frozen": True},
}


@pytest.mark.parametrize("shape", [(4,), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("case", CASES)
def test_with_nothing_deferred_it_is_a_linear_layer(case, shape):
    plain, deferred, _ = pair(**CASES[case])
    x = micro_batch(1, *shape)
    torch.testing.assert_close(through(deferred, x), through(plain, x))
    torch.testing.assert_close(gradients(deferred), gradients(plain))


@pytest.mark.parametrize("case", CASES)
def test_weight_gradients_wait_and_add_up_over_micro_batches(case):
    plain, deferred, deferral = pair(**CASES[case])
    waiting = []
    for seed in (1, 2):
        x = micro_batch(seed, 2, 3)
        with deferral.collecting() as later:
            found = through(deferred, x)
        waiting.append(later)
        torch.testing.assert_close(found, through(plain, x))  # the input's is there at once
        assert deferred.weight.grad is None
        if deferred.bias is not None:
            torch.testing.assert_close(deferred.bias.grad, plain.bias.grad)

    assert [len(later) for later in waiting] == 2 * [int(plain.weight.requires_grad)]
    for later in waiting:
        accumulate_all(later)
        assert later == []  # what has been computed is let go
    torch.testing.assert_close(gradients(deferred), gradients(plain))


def test_after_collecting_nothing_waits_also_where_it_ended_with_an_error():
    plain, deferred, deferral = pair()
    with pytest.raises(KeyError), deferral.collecting():
        raise KeyError
    x = micro_batch(1, 2)
    torch.testing.assert_close(through(deferred, x), through(plain, x))
    torch.testing.assert_close(gradients(deferred), gradients(plain))


def test_what_waits_is_what_it_was_in_the_backward_pass():
    """An optimizer's step, or the next micro-batch, in between changes nothing."""
    plain, deferred, deferral = pair()
    x = micro_batch(1, 2)
    through(plain, x)
    with deferral.collecting() as later:
        through(deferred, x)
    with torch.no_grad():
        deferred.weight.zero_()
    accumulate_all(later)
    torch.testing.assert_close(deferred.weight.grad, plain.weight.grad)


def test_hooks_of_the_weight_hear_once_when_its_gradient_is_there():
    _, deferred, deferral = pair()
    heard = []

    def hook(parameter):
        heard.append(None if parameter.grad is None else parameter.grad.clone())

    deferred.weight.register_post_accumulate_grad_hook(hook)
    with deferral.collecting() as later:
        through(deferred, micro_batch(1, 2))
    # autograd calls the hook of a gradient of None as well
    assert all(grad is None for grad in heard)
    heard.clear()
    accumulate_all(later)
    assert len(heard) == 1 and torch.equal(heard[0], deferred.weight.grad)


def test_one_list_takes_all_layers_of_a_model_and_no_others_become_deferred():
    model = nn.Sequential(nn.Linear(IN, IN), nn.LayerNorm(IN), nn.Sequential(nn.Linear(IN, OUT)))
    names = list(model.state_dict())
    deferral = apply_deferred_weight_gradients(model)
    assert list(model.state_dict()) == names
    assert [
        type(module) for module in model.modules() if not isinstance(module, nn.Sequential)
    ] == [Linear, nn.LayerNorm, Linear]
    with deferral.collecting() as later:
        through(model, micro_batch(1, 2).float())
    assert len(later) == 2
    assert model[1].weight.grad is not None and model[0].weight.grad is None


@pytest.mark.parametrize("waits", [False, True])
def test_under_autocast_products_are_bfloat16_and_gradients_float32(waits):
    results = []
    for deferred in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(IN, OUT)
        deferral = apply_deferred_weight_gradients(layer) if deferred else None
        x = micro_batch(1, 2, 3).float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        assert out.dtype == torch.bfloat16
        if deferred and waits:
            with deferral.collecting() as later:
                out.float().sum().backward()
            assert layer.weight.grad is None
            accumulate_all(later)
        else:
            out.float().sum().backward()
        results.append([out.detach(), x.grad, *gradients(layer)])
    plain, deferred = results
    assert deferred[2].dtype == torch.float32
    torch.testing.assert_close(deferred, plain, rtol=2**-7, atol=2**-7)
