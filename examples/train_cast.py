"""Fine-tune a text-to-image pipeline with CAST.

- ``python examples/train_cast.py`` trains the miniature on two CPU cores;
- ``python examples/train_cast.py loss.maps=none advantage=scalar`` is the ablation: Flow-GRPO's scalar
  advantage and no maps (add ``delta=1e-4 loss.ratio=sample loss.clip_epsilon=1e-3`` for its other choices);
- ``python examples/train_cast.py window=measured`` explores where the model's own trajectories say that it matters.

Every setting is in ``config/train_cast.yaml``. Results land in ``runs/train_cast/<time>``; to go on with a run that was
killed, repeat its command line with its folder: ``hydra.run.dir=runs/train_cast/<time>``.
"""

from functools import partial
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import TransformedEnv
from torchrl.record.loggers.utils import get_logger
from tqdm import tqdm

from cast_rl.backbones import free_text_encoders, load_backbone
from cast_rl.ema import WeightAverage
from cast_rl.envs import AtomRewardTransform, DenoisingEnv
from cast_rl.evaluation import evaluate
from cast_rl.judges import load_judge
from cast_rl.objectives import AtomAdvantage, CASTLoss
from cast_rl.optim import GuardedStep, backward_in_parts
from cast_rl.policy import make_policy
from cast_rl.prompt_bank import PromptBank
from cast_rl.prompts import load_prompts
from cast_rl.report import summary, write_report
from cast_rl.resume import resume, started_from
from cast_rl.saving import save_weights
from cast_rl.seeding import derive_seed
from cast_rl.settings import check_training
from cast_rl.window.measured import measured_window


@hydra.main(config_path="config", config_name="train_cast", version_base="1.3")
def main(cfg: DictConfig) -> None:
    folder = Path(hydra.core.hydra_config.HydraConfig.get().runtime.output_dir)
    window = check_training(cfg)

    # What to draw: nothing trains on what is held out. Then the model, and who judges its images.
    train = load_prompts(cfg.prompts.source, cfg.prompts.train, seed=1000 + cfg.seed, held_out=False)
    held_out = load_prompts(cfg.prompts.source, cfg.prompts.held_out, seed=cfg.prompts.held_out_seed, held_out=True)
    print(f"{len(train)} training prompts such as {train[0].text!r}; {len(held_out)} held out")
    options = {"dtype": cfg.model.dtype, "device": cfg.device, "guidance": cfg.model.guidance, **cfg.model.options}
    backbone = load_backbone(cfg.model.source, memory=cfg.memory, **options)
    size = {"height": cfg.model.height, "width": cfg.model.width, "steps": cfg.model.steps}
    rollout_size = size | {"steps": cfg.rollout.steps}
    noise = {"transition": cfg.rollout.transition, "a": cfg.rollout.noise}
    judging = {"device": cfg.judge_device or cfg.device, "dtype": cfg.judge_dtype}
    judge = load_judge(cfg.judge, quantization=cfg.judge_quantization, **judging)
    examiner = judge if cfg.examiner == cfg.judge else load_judge(cfg.examiner, **judging)

    if window is None:
        probes = load_prompts(cfg.prompts.source, cfg.prompts.measured, seed=cfg.measured.seed, held_out=False)
        settings = {**rollout_size, **noise, **cfg.measured, "negative_prompt": cfg.model.negative_prompt}
        window = measured_window(backbone, judge, probes, folder, **settings)
    settings = OmegaConf.to_container(cfg, resolve=True) | started_from(backbone, judge)
    torch.manual_seed(cfg.seed)
    # The KL term needs the model before training: LoRA has it with adapters off, otherwise a copy is kept.
    keep = cfg.loss.kl_coeff is not None
    backbone.make_trainable(lora=cfg.model.lora, only=cfg.model.weights, keep_reference=keep)

    # Prompts are encoded once; from here on a prompt is an integer.
    encode = partial(PromptBank.encode, backbone, negative=cfg.model.negative_prompt, folder=cfg.memory.prompt_bank)
    bank, held_out_bank = encode(train.texts), encode(held_out.texts)
    if cfg.memory.free_text_encoders:
        free_text_encoders(backbone)

    # Each episode denoises one batch of groups; the judge scores the images at its end.
    groups = {"prompts_per_batch": cfg.rollout.prompts_per_iteration, "group_size": cfg.rollout.group_size}
    randomness = {"window": window, "seed": cfg.seed, "share_noise": cfg.rollout.share_noise}
    base_env = DenoisingEnv.from_backbone(backbone, len(train), **rollout_size, **noise, **groups, **randomness)
    rewarding = {"skill_weights": cfg.skill_weights, "max_failed": cfg.max_judge_failures}
    atom_reward = AtomRewardTransform(judge, train, grid=base_env.latent_shape[1:], **rewarding)
    env = TransformedEnv(base_env, atom_reward)
    policy = make_policy(backbone, bank, base_env.sigmas, **noise)

    # On the way into the buffer trajectories become window steps with advantages.
    shape = {"maps": cfg.loss.maps, "uniform": cfg.loss.uniform, "map_cap": cfg.loss.map_cap}
    advantage = AtomAdvantage(advantage=cfg.advantage, delta=cfg.delta, **shape)
    transitions = base_env.batch_size[0] * window.width
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(transitions, device=cfg.device),
        sampler=SamplerWithoutReplacement(),
        batch_size=cfg.optim.batch_size,
        transform=advantage,
    )
    kl = {"kl_coeff": cfg.loss.kl_coeff, "reference": backbone.reference}
    cast_loss = CASTLoss(policy, clip_epsilon=cfg.loss.clip_epsilon, ratio=cfg.loss.ratio, **kl)
    trained, decay = backbone.trainable_parameters(), cfg.optim.weight_decay
    optimizer = torch.optim.AdamW(trained, lr=cfg.optim.learning_rate, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, cfg.optim.final_rate, total_iters=cfg.iterations)
    average = WeightAverage(backbone, cfg.optim.ema)
    guard = GuardedStep(optimizer, max_norm=cfg.optim.max_grad_norm, max_bad_steps=cfg.optim.max_bad_steps)
    logger = get_logger(cfg.log.backend, logger_name=str(folder), experiment_name="log")

    before = evaluate(backbone, examiner, held_out, held_out_bank, **size)
    state = {"iteration": 0, "scores": [], "config": settings}
    weights = torch.nn.ParameterList(trained)
    checkpoint = Checkpoint(weights=weights, average=average, optimizer=optimizer, schedule=schedule, state=state)
    free = ["checkpoint_every", "device", "log"]
    if resume(checkpoint, folder / "checkpoint", state, device=cfg.device, may_differ=free):
        print(f"going on from iteration {state['iteration']}; log rows after it are written again")
    base_env.iteration = state["iteration"]

    frames = base_env.batch_size[0] * base_env.episode_length
    options = {"frames_per_batch": frames, "device": cfg.device, "auto_register_policy_transforms": False}
    collector = Collector(env, policy, **options)
    rollouts = iter(collector)
    todo = {"initial": state["iteration"], "total": cfg.iterations}
    progress = tqdm(range(state["iteration"], cfg.iterations), desc="train", unit="iteration", **todo)
    for iteration in progress:
        # Randomness is a function of the iteration, so that a resumed run repeats an uninterrupted one.
        torch.manual_seed(derive_seed(cfg.seed, iteration))
        buffer.empty()
        buffer.extend(next(rollouts))
        state["scores"].append(advantage.stats["mean_score"])
        logs = []
        for _ in range(cfg.optim.epochs):
            for batch in buffer:
                loss, terms = backward_in_parts(cast_loss, batch, cfg.optim.micro_batch)
                report = guard.step(loss)
                average.step()
                logs.append({k: v.item() for k, v in terms.items()} | report.gradients())
        schedule.step()
        # On fresh data the ratio is 1; what is left is how far training recomputes other log-probabilities.
        metrics = summary(logs) | {"first_pass_log_ratio": logs[0]["max_abs_log_ratio"]}
        logger.log_metrics(metrics | advantage.stats | atom_reward.counts | {"skipped": guard.skipped}, step=iteration)
        progress.set_postfix(score=f"{state['scores'][-1]:.3f}", grad=f"{metrics['grad_norm']:.2g}")
        state["iteration"] = iteration + 1
        if state["iteration"] % cfg.checkpoint_every == 0 or state["iteration"] == cfg.iterations:
            checkpoint.save(folder / "checkpoint")
    collector.shutdown()
    save_weights(backbone, folder, average=average, settings=state["config"])

    with average.averaged():
        after = evaluate(backbone, examiner, held_out, held_out_bank, **size)
    print(write_report(folder, before, after, state["scores"], cfg.log.pictures))
    print(f"pictures, weights and logs: {folder}")


if __name__ == "__main__":
    main()
