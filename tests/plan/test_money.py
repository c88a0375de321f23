"""Days, hours, energy and money against what has been published."""

import pytest

from minitron.config import ConfigError
from minitron.plan.money import GpuHour, bill, energy, gpu_hours, training_days

# Patterson et al. 2021, "Carbon Emissions and Large Neural Network Training" (arXiv:2104.10350),
# table 4: FLOPs, chips, TFLOP/s and watts of each, PUE, days, MWh. GPT-3's 10,000 chips are assumed
# there, and its days follow from them. Days are printed with up to three digits, T5's with one.
PATTERSON = {
    "Evolved Transformer": (2.91e21, 200, 24.8, 208, 1.10, 6.8, 7.5),
    "T5": (4.05e22, 512, 45.6, 310, 1.12, 20, 85.7),
    "Meena": (1.12e23, 1024, 42.3, 289, 1.09, 30, 232),
    "GShard-600B": (1.33e22, 1024, 48.0, 288, 1.09, 3.1, 24.1),
    "Switch Transformer": (8.22e22, 1024, 34.4, 245, 1.10, 27, 179),
    "GPT-3": (3.14e23, 10000, 24.6, 330, 1.10, 14.8, 1287),
}


@pytest.mark.parametrize("name", PATTERSON)
def test_days_and_energy_of_pattersons_table_4(name):
    flops, chips, teraflops, watts, pue, days, megawatt_hours = PATTERSON[name]
    assert training_days(flops, chips, teraflops * 1e12) == pytest.approx(days, rel=0.02)
    assert energy(gpu_hours(chips, days), watts, pue) == pytest.approx(megawatt_hours, rel=0.01)


@pytest.mark.parametrize(
    ("hours", "watts", "pue", "megawatt_hours"),
    [
        (
            1_082_990,
            400,
            1,
            433.196,
        ),  # BLOOM 176B, Luccioni et al. 2022 (arXiv:2211.02001), GPUs alone
        (320_256, 280, 1, 89.67168),  # StarCoderBase, Li et al. 2023 (arXiv:2305.06161)
        (1_022_362, 400, 1.1, 449),  # LLaMA 65B, Touvron et al. 2023 (arXiv:2302.13971), table 15
    ],
)
def test_energy_of_published_gpu_hours(hours, watts, pue, megawatt_hours):
    assert energy(hours, watts, pue) == pytest.approx(megawatt_hours, rel=2e-3)


@pytest.mark.parametrize(
    ("num_gpus", "days", "hours"),
    [
        (440, 9.5, 100_320),  # MPT-7B (MosaicML's announcement, 2023)
        (512, 53, 651_264),  # BloombergGPT, Wu et al. 2023 (arXiv:2303.17564)
        (384, 24, 221_184),  # SmolLM3 (Hugging Face's announcement, 2025)
    ],
)
def test_published_gpu_hours(num_gpus, days, hours):
    assert gpu_hours(num_gpus, days) == hours


def test_narayanans_months():
    """Section 5.1: GPT-3 takes 34 days on 1024 A100s at 140 TFLOP/s, 1T (1008 B) 84 on 3072."""
    assert training_days(8 * 300e9 * 175e9, 1024, 140e12) == pytest.approx(34, abs=0.5)
    assert training_days(8 * 450e9 * 1008e9, 3072, 163e12) == pytest.approx(84, abs=0.5)


def test_a_bill_by_hand():
    """1000 tokens in steps of 300: four steps of 6 hours are a day; two GPUs, 48 hours."""
    total = bill(1000, 300, 6 * 3600, 2, GpuHour(watts=500, pue=1.2, price=2.5))
    assert (total.steps, total.days, total.gpu_hours) == (4, 1.0, 48.0)
    assert total.price == 120 and total.megawatt_hours == pytest.approx(48 * 500 * 1.2 / 1e6)
    unknown = bill(1000, 300, 1, 2, GpuHour())
    assert unknown.price is None and unknown.megawatt_hours is None


def test_a_price_of_published_gpu_hours():
    """DeepSeek-V3's 2.788 million GPU-hours at 2 dollars are 5.576 million (its table 1)."""
    seconds = 2_788_000 / 2048 * 3600
    assert bill(1, 1, seconds, 2048, GpuHour(watts=1, price=2)).price == pytest.approx(5.576e6)


@pytest.mark.parametrize(
    ("hour", "message"),
    [
        ({"watts": 0}, "--watts 0: must be greater than 0"),
        ({"watts": 700, "pue": 0.9}, "--pue 0.9: .* 1 or more"),
        ({"watts": 700, "price": -1}, "--price -1: must be 0 or more"),
        ({"watts": float("inf")}, "--watts inf: must be a number"),
        ({"pue": float("inf")}, "--pue inf: must be a number"),
        ({"price": float("nan")}, "--price nan: must be a number"),
    ],
)
def test_what_cannot_be_paid(hour, message):
    with pytest.raises(ConfigError, match=message):
        GpuHour(**hour)
