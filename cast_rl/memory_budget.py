"""From what a recipe needs to how it fits a machine: weights' precision, where the judge and the text encoders are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cast_rl.memory_plan import GB, LINEAR_BYTES, USABLE, Needs


@dataclass(frozen=True)
class Machine:
    """`devices` accelerators of `gigabytes` (1e9 bytes) each."""

    devices: int
    gigabytes: int

    def __str__(self) -> str:
        return f"{self.devices}x{self.gigabytes}"


MACHINES = (Machine(1, 24), Machine(1, 80), Machine(1, 140), Machine(8, 80))


@dataclass(frozen=True)
class Choice:
    """One way to spend a device's memory.

    Args:
        weights: precision of the frozen transformer, a key of `cast_rl.memory_plan.LINEAR_BYTES`.
        sharded: whether each device holds its share of the transformer and gathers two blocks at a time.
        judge: precision of the judge, or "elsewhere": on another device or the CPU.
        encoders: text encoders on the "device" until they are freed, or "offloaded" to the CPU until then.
    """

    weights: str
    sharded: bool
    judge: str
    encoders: str

    def __str__(self) -> str:
        shards = ", sharded" if self.sharded else ""
        return f"{self.weights}{shards}; judge {self.judge}; text encoders {self.encoders}"


@dataclass(frozen=True)
class Plan:
    """A choice with its bytes per device: what is there all the time by name, and each phase's own."""

    machine: Machine
    choice: Choice
    resident: dict[str, float]
    phases: dict[str, float]

    @property
    def largest(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def bytes(self) -> float:
        """At the worst moment."""
        return sum(self.resident.values()) + self.phases[self.largest]

    @property
    def fits(self) -> bool:
        """Whether it leaves the share of the device that nobody can plan for."""
        return self.bytes <= USABLE * self.machine.gigabytes * GB

    def __str__(self) -> str:
        parts = [f"{name} {size / GB:.1f}" for name, size in self.resident.items() if size]
        verdict = f"{'' if self.fits else 'does not fit, needs '}{self.bytes / GB:.1f} GB"
        parts.append(f"{self.largest} {self.phases[self.largest] / GB:.1f}")
        return f"{self.machine!s:>5}: {verdict} ({self.choice}) = {' + '.join(parts)}"


def choices(devices: int) -> Iterator[Choice]:
    """From the least loss of precision and speed to the least memory."""
    for judge in ("bf16", "nf4", "elsewhere"):
        for weights in LINEAR_BYTES:
            for sharded in (False, True) if devices > 1 and weights == "bf16" else (False,):
                for encoders in ("device", "offloaded"):
                    yield Choice(weights, sharded, judge, encoders)


def plan_lora(needs: Needs, machine: Machine, choice: Choice, *, ema: bool) -> Plan:
    """Bytes per device of LoRA training at one image per pass, float32 adapters under AdamW.

    Gradients of the adapters are part of the training phase, as measured.
    """
    weights = needs.transformer.bytes(choice.weights)
    if choice.sharded:
        weights = weights / machine.devices + 2 * 2 * needs.block
    judge_here = choice.judge != "elsewhere"
    resident = {
        "weights": weights,
        "adapters and optimizer": needs.adapters * 4 * (1 + 2 + ema),
        "VAE": needs.vae.bytes("bf16"),
        "judge": needs.judge.bytes(choice.judge) if judge_here else 0.0,
    }
    phases = {"train": needs.train, "rollout": needs.rollout, "decode": needs.decode}
    phases["judging"] = needs.judging if judge_here else 0.0
    phases["encoding"] = needs.text_encoders.bytes("bf16") if choice.encoders == "device" else 0.0
    return Plan(machine, choice, resident, phases)


def best_lora(needs: Needs, machine: Machine, *, ema: bool = False) -> Plan:
    """The first of `choices` that fits; the last, which does not, if none does."""
    plans = [plan_lora(needs, machine, choice, ema=ema) for choice in choices(machine.devices)]
    return next((plan for plan in plans if plan.fits), plans[-1])


def full_bytes(needs: Needs, machine: Machine) -> float:
    """Per device, when all weights are trained in float32 under AdamW, sharded over the machine, judge elsewhere.

    Weights, gradients and two moments are 16 bytes per weight; activations are twice those in bf16, an upper bound
    since the measured ones have the adapters' among them; a KL term's reference would be 4 bytes per weight more.
    """
    states = 16 * needs.transformer.total / machine.devices
    gathered = 2 * 4 * needs.block if machine.devices > 1 else 0
    return states + gathered + 2 * needs.train + 2 * needs.vae.bytes("bf16")


def report(needs: Needs, *, ema: bool = False) -> list[str]:
    """Lines of text: one per machine, one on training all weights, and the text encoders' size."""
    lines = [str(best_lora(needs, machine, ema=ema)) for machine in MACHINES]
    full = {str(machine): full_bytes(needs, machine) for machine in MACHINES}
    fitting = [str(m) for m in MACHINES if full[str(m)] <= USABLE * m.gigabytes * GB]
    where = ", ".join(f"{name} ({full[name] / GB:.0f} GB each)" for name in fitting) or "none of these"
    lines.append(f"all weights in float32, sharded, judge elsewhere: {where}")
    counted = {"transformer": needs.transformer, "text encoders": needs.text_encoders, "judge": needs.judge}
    lines.append(
        "billions of weights: " + ", ".join(f"{name} {size.total / 1e9:.2f}" for name, size in counted.items())
    )
    return lines
