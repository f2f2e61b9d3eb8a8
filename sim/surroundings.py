"""What all simulated workers of a fleet share."""

from dataclasses import dataclass, field

from sim.block_sources import LendingWorker
from sim.cores import Machine
from sim.costs import Costs
from sim.links import ArrivalTable
from sim.worker import SimulatedPrompts


@dataclass(frozen=True)
class Surroundings:
    """The costs and the machine of a fleet, and what its workers know of each other.

    Attributes:
        arrivals: the prompts that decode pools expect.
        prompts: those of all active requests.
        lenders: the workers that lend blocks, by address.
    """

    costs: Costs
    machine: Machine
    arrivals: ArrivalTable = field(default_factory=ArrivalTable)
    prompts: SimulatedPrompts = field(default_factory=SimulatedPrompts)
    lenders: dict[str, LendingWorker] = field(default_factory=dict)
