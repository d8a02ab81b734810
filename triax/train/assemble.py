"""How are the parts of a run put together on one rank? The same for training and for proving that it is right."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from triax.data.batch import Batches
from triax.nn.decoder import Decoder
from triax.parallel.compiled import compile_layers
from triax.parallel.execute import Executor
from triax.parallel.expert import ExpertLoad
from triax.parallel.launch import Process
from triax.parallel.mesh import build_mesh
from triax.parallel.place import make_executor, place
from triax.parallel.progress import Progress
from triax.parallel.tied import TiedEmbedding
from triax.spec.context import computed_length
from triax.spec.layout import Layout
from triax.spec.run import Run
from triax.spec.schedule import build
from triax.train.optimizer import Optimizer
from triax.train.step import Stepper


@dataclass(frozen=True, slots=True)
class Parts:
    """What takes steps on one rank."""

    mesh: DeviceMesh
    stages: Sequence[Decoder]
    """This rank's, with memory but without values: fill them, and call ``optimizer.copy_tied`` then."""
    optimizer: Optimizer
    executor: Executor
    stepper: Stepper


def assemble(run: Run, layout: Layout, process: Process, batches: Batches, progress: Progress) -> Parts:
    """Return the parts of ``run`` in ``layout`` on the rank ``process``; all ranks call this together."""
    device = process.device
    mesh = build_mesh(layout, device.type)
    stages = place(run.model, layout, run.precision, mesh, device)
    compile_layers(stages, run.train.compile)
    optimizer = Optimizer(stages, run.model, run.optimizer, device)
    table = build(layout.schedule, layout.pp, layout.stages_per_rank, layout.microbatches)
    length = computed_length(run.data.seq_len, layout.cp, layout.tp)
    executor = make_executor(table, stages, layout, run.precision, mesh, length, device, progress)
    tied = TiedEmbedding(stages, layout, table)
    load = ExpertLoad(stages, run.model, device)
    data_rank = layout.data_rank(process.rank)
    stepper = Stepper(run, layout, executor, optimizer, batches, tied, load, mesh, data_rank, device, progress)
    return Parts(mesh, stages, optimizer, executor, stepper)
