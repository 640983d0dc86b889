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


# How a run is told what the plans choose, with `train_cast.py`'s settings.
HOW = (
    "nf4, int8: quantization=nf4; judge nf4: judge_quantization=nf4; judge elsewhere: judge_device=cuda:1 or cpu; text "
    "encoders device: memory.group_offload=null"
)


@dataclass(frozen=True)
class Choice:
    """One way to spend a device's memory.

    Args:
        weights: precision of the frozen transformer, a key of `cast_rl.memory_plan.LINEAR_BYTES`.
        judge: precision of the judge, or "elsewhere": on another device or the CPU.
        encoders: text encoders on the "device" until they are freed, or "offloaded" to the CPU until then.
    """

    weights: str
    judge: str
    encoders: str

    def __str__(self) -> str:
        return f"{self.weights}; judge {self.judge}; text encoders {self.encoders}"


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


def choices() -> Iterator[Choice]:
    """From the least loss of precision and speed to the least memory; each device holds all of it."""
    for judge in ("bf16", "nf4", "elsewhere"):
        for weights in LINEAR_BYTES:
            for encoders in ("device", "offloaded"):
                yield Choice(weights, judge, encoders)


def plan_lora(needs: Needs, machine: Machine, choice: Choice, *, ema: bool) -> Plan:
    """Bytes per device of LoRA training at one image per pass, float32 adapters under AdamW.

    Gradients of the adapters are part of the training phase, as measured.
    """
    judge_here = choice.judge != "elsewhere"
    resident = {
        "weights": needs.transformer.bytes(choice.weights),
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
    plans = [plan_lora(needs, machine, choice, ema=ema) for choice in choices()]
    return next((plan for plan in plans if plan.fits), plans[-1])


def full_bytes(needs: Needs, machine: Machine) -> float:
    """Per device, when all weights are trained in float32 under AdamW, sharded over the machine, judge elsewhere.

    `train_cast.py` does not shard; several devices take a script of your own.

    Weights, gradients and two moments are 16 bytes per weight; activations are twice those in bf16, an upper bound
    since the measured ones have the adapters' among them; a KL term's reference would be 4 bytes per weight more.
    """
    states = 16 * needs.transformer.total / machine.devices
    gathered = 2 * 4 * needs.block if machine.devices > 1 else 0
    return states + gathered + 2 * needs.train + 2 * needs.vae.bytes("bf16")


def report(needs: Needs, *, ema: bool = False) -> list[str]:
    """Lines of text: one per machine, how a run is told, one on training all weights, and the models' sizes."""
    lines = [str(best_lora(needs, machine, ema=ema)) for machine in MACHINES]
    lines.append(HOW)
    full = {str(machine): full_bytes(needs, machine) for machine in MACHINES}
    fitting = [str(m) for m in MACHINES if full[str(m)] <= USABLE * m.gigabytes * GB]
    where = ", ".join(f"{name} ({full[name] / GB:.0f} GB each)" for name in fitting) or "none of these"
    lines.append(f"all weights in float32, judge elsewhere, 8x80 sharded by a script of your own: {where}")
    counted = {"transformer": needs.transformer, "text encoders": needs.text_encoders, "judge": needs.judge}
    lines.append(
        "billions of weights: " + ", ".join(f"{name} {size.total / 1e9:.2f}" for name, size in counted.items())
    )
    return lines
