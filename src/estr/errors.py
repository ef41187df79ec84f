"""Every error that estr raises on purpose.

EstrError
|-- ConfigError         a recipe, flag or option is wrong; raised before any compute is spent
|-- DataError           a file of problems, a model folder or a recorded run is unusable
|-- EngineError         an engine raised, died or answered nonsense
|   |-- EngineTimeout   ... or did not answer in time
|   `-- ContextFull     the model's context has no room for a turn
|-- WeightsError        published weights are absent, torn, or not the version they claim
|-- EnvError            an environment or a tool failed (a status of the trajectory, never a reward)
|-- GraderError         grading failed (a status of the trajectory, never a reward)
|-- NumericsError       a non-finite value where the mathematics forbids one
|-- StalenessError      the staleness bound was about to be broken (a bug, never tolerated)
|-- GuardError          the data is not what it claims to be, and guard = "stop"
|-- GroupsError         a group was moved where its state forbids, or released twice (a bug)
|-- Stalled             nothing finished within the time limit; says who waits for whom
|-- WorkerError         a spawned process raised something unexpected, or did not answer in time
|   `-- WorkerDied      ... or ended without being asked to
|-- ScheduleError       a replay parts from the schedule that it follows
|-- Interrupted         the user asked the run to stop
`-- CheckpointError     a checkpoint is absent, torn or foreign
"""

from __future__ import annotations


class EstrError(Exception):
    """Base of all errors raised on purpose; `except EstrError` catches them all."""


class ConfigError(EstrError):
    """A recipe, flag or option is wrong. The message names the key, the value and the remedy."""


class DataError(EstrError):
    """A file of problems, a model folder or a recorded run cannot be used."""


class EngineError(EstrError):
    """An engine raised, died or answered nonsense."""


class EngineTimeout(EngineError):
    """An engine did not answer before the deadline."""


class ContextFull(EngineError):
    """A turn was asked for where the model's context has no room for one more token."""


class WeightsError(EstrError):
    """Published weights are absent, torn, or not the version that they claim to be."""


class EnvError(EstrError):
    """An environment or one of its tools failed."""


class GraderError(EstrError):
    """Grading failed; the trajectory stays unscored."""


class NumericsError(EstrError):
    """A NaN or infinity stands where the mathematics forbids one."""


class StalenessError(EstrError):
    """The staleness bound was about to be broken."""


class GuardError(EstrError):
    """A check of the guard found that the data is not what it claims to be."""


class GroupsError(EstrError):
    """A group was moved where its state forbids, or its lease was released twice."""


class Stalled(EstrError):
    """Nothing finished within the time limit. The message says who waits for whom."""


class WorkerError(EstrError):
    """A spawned process raised something unexpected, or did not answer in time."""


class WorkerDied(WorkerError):
    """A spawned process ended without being asked to."""


class ScheduleError(EstrError):
    """A replay parts from its schedule. The message names the first event that differs."""


class Interrupted(EstrError):
    """The user asked the run to stop."""


class CheckpointError(EstrError):
    """A checkpoint is absent, torn or foreign."""


def first_raised(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show: the first one raised on purpose, else the first of all."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [failures]
    while stack:
        error = stack.pop(0)
        if isinstance(error, BaseExceptionGroup):
            stack.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, EstrError)), leaves[0])
