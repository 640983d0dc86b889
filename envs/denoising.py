"""Denoising as a TorchRL environment that holds no network."""

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

from cast_rl.envs.draws import draw_latent_seeds, draw_prompts
from cast_rl.transitions import Kind
from cast_rl.window import FixedWindow, WindowSampler, check_windows


class DenoisingEnv(EnvBase):
    """A batch of ``prompts_per_batch`` groups of ``group_size`` images of one prompt, denoised together.

    An episode is ``width + 2`` steps: a deterministic macro step up to the SDE window, one step per
    stochastic transition, and a deterministic macro step to the image. Macro steps may have zero length, so
    that every episode has the same number of steps. The policy computes each next latent and hands it over as
    the action; the environment keeps the books and decodes at the end.

    Keys (``B = prompts_per_batch * group_size``; rows of a group are next to each other):

    - observations: ``latent (B, C, h, w)`` float32; ``step_index``, ``next_index``, ``window_start``,
      ``prompt_id``, ``group_id`` int64 and ``in_window`` bool, ``(B, 1)``;
    - ``action (B, C, h, w)``: the next latent;
    - next to a step: ``reward (B, 1)``, 0 here, ``pixels (B, 3, H, W)`` in [0, 1], 0 until done (both in the
      reward spec: they have no value at reset), ``done`` and ``terminated (B, 1)``.

    Prompts, initial noise and windows are pure functions of ``(seed, iteration, rank)``. Each reset draws the
    iteration that `iteration` names and moves on to the next one. A partial reset (``_reset`` mask) does so
    for the rows it resets, which then belong to new groups. `set_seed` goes back to iteration 0. Pass
    ``TensorDict(prompt_id=(B, 1))`` with ``set_state=True`` to `reset` to choose the prompts.

    Args:
        sigmas: schedule, ``(steps + 1,)``, strictly falling to 0.
        latent_shape: ``(C, h, w)``.
        decode: latents ``(n, C, h, w)`` to images ``(n, 3, H, W)`` in [0, 1].
        initial_latents: one seed per row to noise ``(B, C, h, w)``, each row a function of its own seed.
        num_prompts: how many prompts ``prompt_id`` may name.
        image_shape: ``(3, H, W)``.
        prompts_per_batch, group_size: shape of a batch.
        window: ``(start, stop)``, or a `cast_rl.window.WindowSampler`; drawn once per group.
        transition, a: what the policy does inside the window; windows with unusable steps are refused
            (`cast_rl.transitions.usable_steps`). Nothing is refused for ``"ode"`` or ``a = 0``.
        seed, rank, world_size: ranks draw disjoint prompts, noise and group ids.
        share_noise: start all images of a group from the same noise.
        device: where observations live.

    Raises:
        ValueError: for a schedule, shape or window that cannot work, naming it.
    """

    _supports_set_state = True

    def __init__(
        self,
        sigmas: Tensor,
        latent_shape: Sequence[int],
        decode: Callable[[Tensor], Tensor],
        initial_latents: Callable[[Sequence[int]], Tensor],
        num_prompts: int,
        *,
        image_shape: Sequence[int],
        prompts_per_batch: int,
        group_size: int,
        window: tuple[int, int] | WindowSampler,
        transition: Kind = "cps",
        a: float = 0.6,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        share_noise: bool = False,
        device: torch.device | str = "cpu",
    ):
        if group_size < 1:
            raise ValueError(f"group_size={group_size} must be at least 1")
        ranks = {"rank": rank, "world_size": world_size}
        draw_prompts(num_prompts, prompts_per_batch, seed=seed, iteration=0, **ranks)  # checks its arguments
        rows = prompts_per_batch * group_size
        super().__init__(device=torch.device(device), batch_size=[rows])
        # EnvBase is an nn.Module: env.parameters() and env.to() would claim a decoder held as a submodule.
        self.__dict__["_decode"] = decode
        self.__dict__["_initial_latents"] = initial_latents
        self.sigmas = _check_schedule(sigmas)
        self.num_prompts, self.prompts_per_batch, self.group_size = num_prompts, prompts_per_batch, group_size
        self.rank, self.world_size, self.share_noise = rank, world_size, share_noise
        self.latent_shape, self.image_shape = tuple(latent_shape), tuple(image_shape)
        self.window = FixedWindow(window[0], window[1] - window[0]) if isinstance(window, tuple | list) else window
        self.transition, self.a = transition, a
        check_windows(self.sigmas, self.window.starts, self.window.width, transition=transition, a=a)
        self._make_specs()
        self.set_seed(seed)

    @classmethod
    def from_backbone(
        cls, backbone, num_prompts: int, *, height: int, width: int, steps: int, device=None, **options
    ) -> "DenoisingEnv":
        """The environment of a `cast_rl.backbones.Backbone`: its schedule, noise and decoder.

        Args:
            backbone: only its decoder and its noise are used, but it is kept whole; a pickled copy of the
                environment, as a worker process gets one, holds a copy of it.
            height, width: image size in pixels.
            steps: number of denoising steps.
            device: the backbone's unless given.
            options: the keyword arguments of `DenoisingEnv` other than ``image_shape``.
        """
        return cls(
            backbone.sigmas(steps, height, width),
            backbone.latent_shape(height, width),
            backbone.decode,
            _LatentDraw(backbone, height, width),
            num_prompts,
            image_shape=(3, height, width),
            device=backbone.device if device is None else device,
            **options,
        )

    @property
    def steps(self) -> int:
        """Number of denoising steps of the schedule."""
        return len(self.sigmas) - 1

    @property
    def episode_length(self) -> int:
        """Environment steps per episode."""
        return self.window.width + 2

    @property
    def iteration(self) -> int:
        """The iteration that the next reset draws.

        A collector resets ahead of time. To resume, set it to the number of iterations trained on, before the
        collector is built. Through a `TransformedEnv`, which would keep the value to itself, write
        ``env.base_env.iteration = n``.
        """
        return self._iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        if value < 0:
            raise ValueError(f"iteration={value} must be >= 0")
        self._iteration = int(value)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.seed = int(seed)
            self._iteration = 0

    def _make_specs(self) -> None:
        rows, device = self.batch_size, self.device

        def index(high: int) -> Bounded:
            return Bounded(0, high, (*rows, 1), dtype=torch.int64, device=device)

        def flag() -> Binary:
            return Binary(shape=(*rows, 1), dtype=torch.bool, device=device)

        self.observation_spec = Composite(
            latent=Unbounded((*rows, *self.latent_shape), device=device),
            step_index=index(self.steps),
            next_index=index(self.steps),
            window_start=index(self.steps),
            in_window=flag(),
            prompt_id=index(self.num_prompts - 1),
            group_id=Unbounded((*rows, 1), dtype=torch.int64, device=device),
            shape=rows,
            device=device,
        )
        # TransformedEnv hands a reset only the keys declared as state.
        self.state_spec = Composite(prompt_id=index(self.num_prompts - 1), shape=rows, device=device)
        self.action_spec = Unbounded((*rows, *self.latent_shape), device=device)
        self.reward_spec = Composite(
            reward=Unbounded((*rows, 1), device=device),
            pixels=Unbounded((*rows, *self.image_shape), device=device),
            shape=rows,
            device=device,
        )
        self.done_spec = Composite(done=flag(), terminated=flag(), shape=rows, device=device)

    def _reset(self, tensordict: TensorDictBase | None = None, *, set_state: bool = False, **_) -> TensorDictBase:
        given = tensordict.get("prompt_id", None) if tensordict is not None and set_state else None
        mask = tensordict.get("_reset", None) if tensordict is not None else None
        draw = {"seed": self.seed, "iteration": self._iteration, "rank": self.rank}
        groups = torch.arange(self.prompts_per_batch) + self.rank * self.prompts_per_batch
        if given is None:
            prompts = draw_prompts(self.num_prompts, self.prompts_per_batch, world_size=self.world_size, **draw)
            prompts = prompts.repeat_interleave(self.group_size).unsqueeze(-1)
        else:
            prompts = self._check_given(given, mask)
        starts = [int(self.window(self.seed, self._iteration, group)) for group in groups.tolist()]
        check_windows(self.sigmas, starts, self.window.width, transition=self.transition, a=self.a)
        seeds = draw_latent_seeds(self.prompts_per_batch, self.group_size, share_noise=self.share_noise, **draw)
        latent = self._initial_latents(seeds)
        expected = (*self.batch_size, *self.latent_shape)
        if latent.shape != expected:
            raise ValueError(f"initial_latents gave {tuple(latent.shape)}, expected {expected}")
        start = self._per_row(torch.tensor(starts))
        zero = torch.zeros_like(start)
        group_ids = groups + self._iteration * self.prompts_per_batch * self.world_size
        self._iteration += 1
        return TensorDict(
            latent=latent.to(self.device, torch.float32),
            step_index=zero,
            next_index=start.clone(),
            window_start=start,
            in_window=zero.bool(),
            prompt_id=prompts.to(self.device),
            group_id=self._per_row(group_ids),
            batch_size=self.batch_size,
            device=self.device,
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        step, start, latent = tensordict["next_index"], tensordict["window_start"], tensordict["action"]
        was_in_window = tensordict["in_window"]
        before = ~was_in_window & (step == start)
        in_window = before | (was_in_window & (step < start + self.window.width))
        done = ~was_in_window & ~before
        return TensorDict(
            latent=latent,
            step_index=step,
            next_index=torch.where(in_window, step + 1, self.steps),
            window_start=start,
            in_window=in_window,
            prompt_id=tensordict["prompt_id"],
            group_id=tensordict["group_id"],
            reward=torch.zeros(*self.batch_size, 1, device=self.device),
            pixels=self._pixels(latent, done.squeeze(-1)),
            done=done,
            terminated=done.clone(),
            batch_size=self.batch_size,
            device=self.device,
        )

    @torch.no_grad()
    def _pixels(self, latent: Tensor, done: Tensor) -> Tensor:
        shape = (*self.batch_size, *self.image_shape)
        if not done.any():
            # A view of one zero: images are large, and most steps have none.
            return torch.zeros((), device=self.device).expand(shape)
        images = self._decode(latent[done])
        if images.shape[1:] != self.image_shape:
            raise ValueError(
                f"decode gave images of shape {tuple(images.shape[1:])}, image_shape is {self.image_shape}"
            )
        pixels = torch.zeros(shape, device=self.device)
        pixels[done] = images.to(self.device, torch.float32)
        return pixels

    def _per_row(self, per_group: Tensor) -> Tensor:
        return per_group.repeat_interleave(self.group_size).unsqueeze(-1).to(self.device)

    def _check_given(self, given: Tensor, mask: Tensor | None) -> Tensor:
        """Caller-chosen prompts as int64 ``(B, 1)``; only the rows that are reset are checked."""
        given = given.reshape(*self.batch_size, 1).to(torch.int64)
        rows = torch.ones_like(given, dtype=torch.bool) if mask is None else mask.reshape(given.shape)
        bad = rows & ((given < 0) | (given >= self.num_prompts))
        if bad.any():
            raise ValueError(f"prompt_id {int(given[bad][0])} is out of range; there are {self.num_prompts} prompts")
        for group, (ids, used) in enumerate(
            zip(given.split(self.group_size), rows.split(self.group_size), strict=True)
        ):
            if ids[used].unique().numel() > 1:
                raise ValueError(
                    f"group {group} was given the prompts {ids[used].unique().tolist()}; all "
                    f"{self.group_size} rows of a group share one prompt (ids.repeat_interleave(group_size))"
                )
        return given


class _LatentDraw:
    """``backbone.initial_latents`` at one image size; a class so that an environment can be pickled."""

    def __init__(self, backbone, height: int, width: int):
        self.backbone, self.height, self.width = backbone, height, width

    def __call__(self, seeds: Sequence[int]) -> Tensor:
        return self.backbone.initial_latents(seeds, self.height, self.width)


def _check_schedule(sigmas: Tensor) -> Tensor:
    sigmas = torch.as_tensor(sigmas).detach().to("cpu", torch.float32).clone()
    if sigmas.ndim != 1 or len(sigmas) < 2 or sigmas[-1] != 0 or not (sigmas.diff() < 0).all():
        raise ValueError(f"sigmas must fall strictly to 0 over at least one step, got {sigmas.tolist()}")
    return sigmas
