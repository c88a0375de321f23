"""Chapter 1's measurements: what they count as a copy, a variance, a roof."""

import itertools

import pytest
import torch

from minitron import cost
from minitron.corpus.story_grammar import BOYS, OBJECTS, VOCABULARY
from teaching.lab import ch01

END, BOY, THING, OTHER = (
    0,
    VOCABULARY.index(BOYS[0]),
    VOCABULARY.index(OBJECTS[0]),
    next(
        i for i, word in enumerate(VOCABULARY) if word not in {*BOYS, *OBJECTS, "<end>"} and i > 0
    ),
)


def test_only_names_that_stand_earlier_in_their_own_story_can_be_copied():
    words = torch.tensor([[BOY, OTHER, BOY, OTHER, END, BOY, THING, THING]])
    found = ch01.copyable(words[:, :-1], words[:, 1:], END)[0].tolist()
    #      targets: OTHER  BOY   OTHER  END    BOY    THING  THING
    assert found == [False, True, False, False, False, False, True]


def test_the_variance_of_means_falls_with_independent_rows_and_not_with_equal_neighbors():
    rows = torch.randn(512, 200, generator=torch.Generator().manual_seed(0))
    one, eight = ch01.batch_variances(rows, [1, 8])
    assert one / eight == pytest.approx(8, rel=0.1)
    one, eight = ch01.batch_variances(rows[:64].repeat_interleave(8, 0), [1, 8])
    assert one / eight == pytest.approx(1, rel=0.05)


def test_each_sequence_has_a_gradient_of_its_own():
    config = ch01.ModelConfig(
        family="gpt",
        vocab_size=12,
        num_layers=1,
        width=8,
        num_heads=2,
        num_kv_heads=2,
        ffn_width=16,
        max_sequence_length=4,
    )
    model, _ = ch01.new_model(config)
    batch = torch.randint(12, (3, 5), generator=torch.Generator().manual_seed(1))
    rows = ch01.sequence_gradients(model, batch)
    ch01.accumulate_gradients(model, [(batch[:, :-1], batch[:, 1:])])
    together = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(rows.mean(0), together, rtol=1e-4, atol=1e-6)


def test_nothing_is_above_its_roof():
    points = ch01.roofline(peak=1.0, bandwidth=1.0)  # far too low
    for point in points:
        slowest, fastest = point.spread
        assert slowest <= point.reached <= fastest <= point.roof * (1 + 1e-9)
    assert points[0].bound == "memory" and points[-1].bound == "compute"
    assert [p.intensity for p in points] == sorted(p.intensity for p in points)


def test_the_roof_bends_where_compute_takes_as_long_as_memory():
    points = [
        ch01.Roofline(name, at, 1.0, peak=100.0, bandwidth=4.0)
        for name, at in (("add", 0.5), ("matmul", 50.0))
    ]
    assert ch01.roof_line(points) == ([0.5, 25.0, 50.0], [2.0, 100.0, 100.0])


def test_a_step_s_matmuls_have_the_flops_of_the_formula_and_the_rest_next_to_none():
    config = ch01.ModelConfig("llama", 96, 32, 5, 64, 4, 2, 128, tied_embedding=False)
    found = ch01.step_operators(config, 32)
    attention = 3 * 4 * config.num_layers * 32 * config.width
    assert found["matmuls"].flops == 32 * (cost.training_flops_per_token(config, 32) - attention)
    assert found["attention"].flops == 32 * attention * 14 // 12  # backward takes the scores again
    for kind in ("pointwise, norms", "loss", "AdamW"):
        assert 0 < found[kind].flops < found[kind].bytes
    assert found["AdamW"].bytes == pytest.approx(2 * 7 * cost.num_parameters(config), rel=0.01)
    assert ch01.step_operators(config, 32, layers=5) == found


def test_each_operator_s_time_counts_once_and_as_its_kind(monkeypatch):
    a = torch.randn(8, 8)
    readings = itertools.count()  # each look at the clock is a second later than the one before
    monkeypatch.setattr(ch01.time, "perf_counter", lambda: float(next(readings)))
    spent = ch01.operator_times(lambda: (a @ a, a @ a, torch.nn.functional.gelu(a[0])), repeats=3)
    assert spent == {
        "matmuls": 2000,
        "attention": 0,
        "GELU": 1000,
        "other operators": 1000,  # a[0]
        "between operators": pytest.approx(1000 * (3 * 2 * 4 + 1) / 3 - 4000),
    }


def test_what_is_counted_of_a_step_is_what_is_timed():
    config = ch01.ModelConfig("gpt", 12, 8, 1, 8, 2, 2, 16)
    model, optimizer = ch01.new_model(config)
    tokens = torch.randint(12, (3, 9), generator=torch.Generator().manual_seed(1))

    def step():
        logits = model(tokens[:, :-1]).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = ch01.counted_and_timed(step, repeats=2)
    attention = 3 * 4 * config.num_layers * 8 * config.width
    matmuls = 24 * (cost.training_flops_per_token(config, 8) - attention)
    assert found["matmuls"][0].flops == matmuls
    assert found["AdamW"][0].bytes == pytest.approx(28 * cost.num_parameters(config), rel=0.05)
    assert all(each.bytes > 0 and seconds > 0 for each, seconds in found.values())


def test_a_chain_is_timed_or_it_is_said_why_not(monkeypatch):
    x, scale, shift = torch.randn(3, 5), torch.randn(5), torch.randn(5)
    torch.testing.assert_close(ch01.relu_of_scaled(x, scale, shift), (x * scale + shift).relu())

    def broken(function):
        def call(*_):
            raise OSError("no C++ compiler")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(RuntimeError, match="torch.compile does not work here: no C"):
        ch01.eager_and_compiled(4, 4)
