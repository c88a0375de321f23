"""Name the axes along which ranks are laid out: dp, pp, cp, tp, ep, and replicas of a sharded dp.

    mesh = make_mesh("cuda", dp=2, tp=4)    # 8 ranks; rank 5 is (dp 1, tp 1)
    mesh.group("tp"), mesh.rank("tp"), mesh.size("tp")

The last axis varies fastest: its ranks are neighbors, and share a node where there is one. So
name the axis that communicates most last. Reference: torch.distributed.device_mesh.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minitron.comm.agreement import SINGLE_RANK, SingleRank
from minitron.config import require

AXES = ("dp", "replicas", "pp", "cp", "tp", "ep")


@dataclass(frozen=True)
class Mesh:
    """The ranks as a grid with named axes, seen from one rank."""

    device_mesh: DeviceMesh
    """What PyTorch's own functions (DTensor, distributed checkpoints) take."""

    @property
    def axes(self) -> dict[str, int]:
        """The axes in their order, with their sizes."""
        return dict(zip(self.device_mesh.mesh_dim_names, self.device_mesh.shape, strict=True))

    @property
    def num_ranks(self) -> int:
        """The number of all ranks."""
        return prod(self.axes.values())

    def group(self, axis: str) -> ProcessGroup:
        """Return the group of ranks that differ from this one along `axis` alone."""
        return self.device_mesh.get_group(axis)

    def rank(self, axis: str) -> int:
        """Return this rank's place along `axis`, from 0."""
        return self.device_mesh.get_local_rank(axis)

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`."""
        return self.axes[axis]

    def joined_group(self, *axes: str) -> ProcessGroup:
        """Return the group of ranks that differ from this one along these `axes` alone.

        In the order of the mesh; its description is "mesh_dp_cp", say. All of them must ask.
        """
        return join_axes(dist.group.WORLD, tuple(self.axes.items()), axes)


def joined_ranks(axes: dict[str, int], joined: tuple[str, ...], rank: int) -> list[int]:
    """Return the ranks that share with `rank` their places along all other `axes`."""
    places = list(product(*map(range, axes.values())))  # of every rank: the last varies fastest
    own = places[rank]
    kept = [index for index, axis in enumerate(axes) if axis not in joined]
    return [
        other
        for other, place in enumerate(places)
        if all(place[index] == own[index] for index in kept)
    ]


@lru_cache(maxsize=8)  # as `new_mesh`
def join_axes(
    world: ProcessGroup, axes: tuple[tuple[str, int], ...], joined: tuple[str, ...]
) -> ProcessGroup:
    """Make the group of this rank's along several axes; its other ranks must call it too."""
    return dist.new_group(
        joined_ranks(dict(axes), joined, world.rank()),
        use_local_synchronization=True,
        group_desc=f"mesh_{'_'.join(joined)}",
    )


class OneRankMesh:
    """The null case of a mesh: one process, and one rank along every axis."""

    num_ranks = 1

    def group(self, axis: str) -> SingleRank:
        """Return the group of this rank alone."""
        return SINGLE_RANK

    def rank(self, axis: str) -> int:
        """Return this rank's place along `axis`, 0."""
        return 0

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`, 1."""
        return 1


def make_mesh(device_type: str, **axes: int) -> Mesh:
    """Lay out all ranks along `axes`, name to size, in the given order.

    Each axis has a group of its own, with the description "mesh_dp" and so on, also one that
    covers all ranks. The same axes give the same mesh again. Raises ConfigError if the sizes do not
    multiply to the number of ranks.
    """
    world = dist.group.WORLD
    unknown = [axis for axis in axes if axis not in AXES]
    require(not unknown, f"mesh axes {unknown} are unknown", f"choose from {', '.join(AXES)}")
    require(
        prod(axes.values()) == world.size(),
        f"a mesh of {' x '.join(f'{axis} {size}' for axis, size in axes.items())} = "
        f"{prod(axes.values())} ranks does not fit {world.size()} processes",
        "change a size, or the number of processes",
    )
    return new_mesh(world, device_type, tuple(axes.items()))


@lru_cache(maxsize=8)  # a group of gloo's has a thread that wakes up every 10 ms, also when idle
def new_mesh(world: ProcessGroup, device_type: str, axes: tuple[tuple[str, int], ...]) -> Mesh:
    """Make the mesh, with its groups; every rank of `world` must call it."""
    names, sizes = zip(*axes, strict=True)
    # Else an axis that covers all ranks would share their group, whose description names no axis.
    backend = dist.get_backend_config(world)
    return Mesh(
        init_device_mesh(
            device_type, sizes, mesh_dim_names=names, backend_override=dict.fromkeys(names, backend)
        )
    )
