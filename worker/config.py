"""Settings of a worker that names its roles. Does not import torch."""

from pydantic import Field, field_validator

from pool.stage.config import WorkerConfig

ROLES = ("prefill", "decode")


class RolesConfig(WorkerConfig):
    """Settings of `baton worker`."""

    roles: str = Field(
        default=",".join(ROLES),
        description="what the worker does until it is switched: prefill, decode or prefill,decode",
    )
    max_step_s: float = Field(
        default=0.0,
        ge=0,
        le=3600,
        description="seconds for which chunks of prompts should delay the tokens of running requests at "
        "most, on a worker of both roles; longer ones shorten the next; 0: twice as long as a decode step",
    )

    @field_validator("roles")
    @classmethod
    def _checked_roles(cls, text: str) -> str:
        roles = text.split(",")
        if unknown := [role for role in roles if role not in ROLES]:
            raise ValueError(f"roles must be among {', '.join(ROLES)}, got {unknown[0]!r}")
        if len(set(roles)) < len(roles):
            raise ValueError(f"roles must be different, got {text!r}")
        return ",".join(role for role in ROLES if role in roles)
