"""The estimate against published steps, and against what must hold whatever the constants are."""

import statistics
from collections import defaultdict
from dataclasses import replace

import pytest

from minitron import cost
from minitron.config import ConfigError, ModelConfig, ParallelConfig
from minitron.cost.compute import published_llama
from minitron.plan.estimate import RATES, System, estimate
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Decision, Job
from minitron.plan.published import error, published_layers, published_rows, table

H100, A100 = DEVICES["H100-SXM-80GB"], DEVICES["A100-SXM-80GB"]
LLAMA_8B = published_llama(32, 4096, 32, 8, 14336, 128256, 8192)
GPT3 = replace(cost.PUBLISHED["GPT-3 175B"], vocab_size=50304)
PARTS = ["matmul", "attention", "elementwise", "host", "bubble", "tp", "pp", "optimizer", "dp"]
ROWS = published_rows()
LAYOUTS = {
    "one GPU": Decision(ParallelConfig(dp=1)),
    "ZeRO-1": Decision(ParallelConfig(dp=64, zero=1)),
    "ZeRO-3": Decision(ParallelConfig(dp=64, zero=3)),
    "tp over nodes": Decision(ParallelConfig(dp=1, tp=16, sequence=True)),
    "tp": Decision(ParallelConfig(dp=8, tp=8), "full", 2),
    "all": Decision(ParallelConfig(dp=4, tp=4, sequence=True, pp=4, zero=1), "selective"),
}


def job_of(layout, **changes):
    axes = layout.parallel
    return replace(Job(LLAMA_8B, axes.dp * axes.tp * axes.pp, H100, 4096, 256), **changes)


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


# Against publications


def test_the_median_error_of_every_source_is_below_8_percent():
    by_source = defaultdict(list)
    for row in ROWS:
        by_source[row.source].append(abs(error(row.predict().seconds, row.seconds)))
    for _, published, estimated in published_layers():
        by_source["layers"].append(abs(error(estimated, published)))
    assert [len(each) for each in by_source.values()] == [4, 4, 3, 176, 10]
    for source, errors in by_source.items():
        assert statistics.median(errors) < 0.08, source
        assert statistics.median(errors) < 0.05 or "H100" in source, source


def test_the_median_error_of_memory():
    """Above the target, 5 %."""
    errors = [
        abs(error(sum(row.predict().memory.values()), row.memory))
        for row in ROWS
        if row.memory is not None
    ]
    assert len(errors) == 176
    assert 0.05 < statistics.median(errors) < 0.0525


def test_the_flops_are_those_that_each_source_counts():
    """The published seconds and FLOPs per step give the printed FLOP/s: of hardware in Narayanan's
    table, of the model in NVIDIA's."""
    printed = [float(row["tflops_per_gpu_hw"]) for row in table("narayanan2021_table1")]
    printed += [float(row["tflops_per_gpu"]) for row in table("megatron_core_h100_weak_scaling")]
    rows = [row for row in ROWS if "Narayanan" in row.source or "Megatron-Core" in row.source]
    for row, expected in zip(rows, printed, strict=True):
        step = row.predict()
        flops = step.hardware_flops if "Narayanan" in row.source else step.model_flops
        rate = flops / (row.seconds * row.job.num_gpus)
        assert rate == pytest.approx(expected * 1e12, rel=0.005), row.name


def test_the_mfu_of_nanotron_counts_the_embedding_as_a_product():
    printed = [float(row["mfu_pct"]) for row in table("playbook_nanotron_h100_runs")]
    rows = [row for row in ROWS if "nanotron" in row.source]
    for row, expected in zip(rows, printed, strict=True):
        step, model = row.predict(), row.job.model
        embedding = 6 * model.vocab_size * model.width * 256 * 4096
        mfu = 100 * (step.model_flops + embedding) / (row.seconds * step.peak_flops)
        assert mfu == pytest.approx(expected, abs=0.1)


def test_mfu_and_hfu_of_korthikanti():
    """Their equation 8 counts recomputed attention as if it were computed backward again too."""
    printed = {
        row["model"]: (float(row["mfu_pct"]), float(row["hfu_pct"]))
        for row in table("korthikanti2022_table3_table5")
    }
    rows = [row for row in ROWS if "selective" in row.name]
    assert len(rows) == 2
    for row in rows:
        step = row.predict()
        again = step.hardware_flops - step.model_flops
        mfu, hfu = printed[row.name.split(",")[0]]
        scale = 100 / (row.seconds * step.peak_flops)
        assert scale * step.model_flops == pytest.approx(mfu, rel=0.005)
        assert scale * (step.model_flops + 3 * again) == pytest.approx(hfu, rel=0.005)
        assert step.mfu < step.hfu < 1


# What must hold


def test_the_parts_are_the_whole_and_none_is_negative(layout):
    step = estimate(job_of(layout), layout)
    assert sorted(step.parts) == sorted(PARTS)
    assert step.seconds == sum(step.parts.values())
    assert all(seconds >= 0 for seconds in step.parts.values())
    axes = layout.parallel
    for axis in ("tp", "pp", "dp"):
        assert (step.parts[axis] > 0) == (getattr(axes, axis) > 1)
    assert 0 < step.mfu <= step.hfu < 1


@pytest.mark.parametrize(
    "field", ["bf16_flops", "memory_bandwidth", "nvlink_bandwidth", "nic_bandwidth", "matmul_share"]
)
def test_a_faster_device_is_never_slower(layout, field):
    slow = job_of(layout)
    fast = replace(slow, device=replace(H100, **{field: 1.25 * getattr(H100, field)}))
    assert estimate(fast, layout).seconds <= estimate(slow, layout).seconds * (1 + 1e-12)


@pytest.mark.parametrize("field", ["nvlink_latency", "nic_latency"])
def test_a_longer_latency_is_never_faster(layout, field):
    longer = replace(H100, **{field: 1e-3})
    assert (
        estimate(job_of(layout, device=longer), layout).seconds
        >= estimate(job_of(layout), layout).seconds
    )


@pytest.mark.parametrize(
    "smaller", [{"num_layers": 16}, {"vocab_size": 32000}, {"ffn_width": 4096}, {"num_kv_heads": 4}]
)
def test_fewer_flops_are_never_slower(layout, smaller):
    if layout.parallel.tp == 16 and "num_kv_heads" in smaller:
        smaller = {"num_layers": 8}
    small = job_of(layout, model=replace(LLAMA_8B, **smaller))
    assert estimate(small, layout).model_flops < estimate(job_of(layout), layout).model_flops
    assert estimate(small, layout).seconds < estimate(job_of(layout), layout).seconds


def test_recomputation_costs_what_it_says():
    layout = LAYOUTS["one GPU"]
    none, selective, full = (
        estimate(job_of(layout), replace(layout, recompute=kind))
        for kind in ("none", "selective", "full")
    )
    assert none.seconds < selective.seconds < full.seconds
    assert none.hardware_flops == none.model_flops == full.model_flops
    assert 4 / 3 * none.model_flops > full.hardware_flops > selective.hardware_flops
    assert full.parts["matmul"] < 4 / 3 * none.parts["matmul"]  # the head is not computed again


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("model", [LLAMA_8B, GPT3], ids=["Llama 8B", "GPT-3"])
def test_the_products_are_those_of_the_cost_model(model, tp):
    """With a memory that takes no time, and materialized attention, their FLOPs at one rate."""
    device = replace(H100, memory_bandwidth=1e30)
    layout = Decision(ParallelConfig(dp=1, tp=tp), "full")
    job = Job(model, tp, device, 2048, 3, precision="bf16")
    parts = estimate(job, layout, System("materialized")).parts
    flops = (
        3
        * 2048
        * (
            cost.training_flops_per_token(model, 2048)
            + cost.recompute_flops_per_token(model, 2048, "full")
        )
    )
    rate = RATES.matmul * 794.5e12 * tp
    assert parts["matmul"] + parts["attention"] == pytest.approx(flops / rate)
    fused = estimate(job, layout).parts
    assert fused["matmul"] == parts["matmul"]
    # Of four products, twice forward and once backward, half each; one more in the backward pass
    assert fused["attention"] == pytest.approx(
        parts["attention"] * (2 + 2 + 5) / 8 / 2 / RATES.attention
    )


def test_a_product_is_slower_where_it_is_narrow():
    """The same FLOPs on 8 GPUs take longer than an eighth, for each product is read and written."""
    one, eight = (Decision(ParallelConfig(dp=1, tp=tp, sequence=tp > 1)) for tp in (1, 8))
    whole = estimate(job_of(one), one).parts["matmul"]
    assert whole / 8 < estimate(job_of(eight), eight).parts["matmul"] < whole / 6


def test_float8_is_faster_and_float32_much_slower():
    layout = LAYOUTS["one GPU"]
    fp8, bf16, fp32 = (
        estimate(job_of(layout, precision=name), layout).parts["matmul"]
        for name in ("fp8", "bf16", "fp32")
    )
    assert bf16 / 2 < fp8 < bf16 < fp32 / 8
    assert (
        estimate(job_of(layout, device=A100, precision="fp8"), layout).parts["matmul"]
        == estimate(job_of(layout, device=A100), layout).parts["matmul"]
    ), "A100 has none"


def test_heads_that_do_not_divide_are_refused():
    narrow = ModelConfig("gpt", 50304, 1024, 12, 768, 12, 12, 3072)
    layout = Decision(ParallelConfig(dp=1, tp=8))
    with pytest.raises(ConfigError, match="num_heads = 12 is not divisible by 8"):
        estimate(Job(narrow, 8, H100, 1024, 8), layout)


def test_the_cost_does_not_grow_with_the_number_of_gpus():
    """A trillion parameters on 3,072 GPUs (Narayanan et al. 2021, table 1) is arithmetic too."""
    model = ModelConfig("gpt", 51200, 2048, 128, 25600, 160, 160, 4 * 25600, True, 0.1)
    layout = Decision(ParallelConfig(dp=6, tp=8, pp=64), "full")
    step = estimate(Job(model, 3072, A100, 2048, 3072, precision="fp16"), layout)
    assert step.model_flops == 3072 * 2048 * cost.training_flops_per_token(model, 2048)
    assert 0.2 < step.mfu < step.hfu < 0.7
