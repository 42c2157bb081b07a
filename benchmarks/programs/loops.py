"""Plain training loops: `python loops.py KIND`, or under torchrun, with the variables of `simulated_gpu` and STEPS."""

import contextlib
import copy
import random
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from simulated_gpu import NUM_CLASSES, NUM_FEATURES, Gpu, classifier, num_steps, optimizer_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.parallel import DistributedDataParallel

Batch = tuple[torch.Tensor, torch.Tensor]
_EVALUATED_EVERY, _ROUND_STEPS = 40, 20


def batches(seed: int, wait_s: Callable[[], float]) -> Iterator[Batch]:
    """Yield random batches, each after the time that loading takes."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        time.sleep(wait_s())
        rows = torch.randn(8, NUM_FEATURES, generator=generator)
        yield rows, torch.randint(NUM_CLASSES, (8,), generator=generator)


def ddp() -> None:
    """Replicas, one of which has a slow disk, which add up the gradients of two microbatches."""
    gpu = Gpu()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(classifier(gpu, 0.045, 0.095 if rank else 0.105))
    optimizer = optimizer_of(model, gpu, 0.03)
    noise = random.Random(rank)
    data = batches(rank, lambda: 0.02 + (0.05 if rank else 0.01) * noise.random())
    for _ in range(num_steps()):
        total = 0.0
        for microbatch in range(2):
            rows, labels = next(data)
            with contextlib.nullcontext() if microbatch else model.no_sync():
                loss = cross_entropy(model(rows), labels) / 2
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        gpu.step(total)
    dist.destroy_process_group()


def fsdp2() -> None:
    """Shards of one model on two ranks."""
    gpu = Gpu()
    dist.init_process_group("gloo")
    model = classifier(gpu, 0.06, 0.12)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = optimizer_of(model, gpu, 0.03)
    data = batches(dist.get_rank(), lambda: 0.05)
    for _ in range(num_steps()):
        rows, labels = next(data)
        loss = cross_entropy(model(rows), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # as above
        optimizer.step()
        optimizer.zero_grad()
        gpu.step(loss.detach())
    dist.destroy_process_group()


def gan() -> None:
    """Two models, two optimizers and two backwards in each step."""
    gpu = Gpu()
    maker = torch.nn.Sequential(classifier(gpu, 0.025, 0.045), torch.nn.Linear(NUM_CLASSES, NUM_FEATURES))
    critic = torch.nn.Sequential(classifier(gpu, 0.015, 0.035), torch.nn.Linear(NUM_CLASSES, 1))
    of_maker, of_critic = optimizer_of(maker, gpu, 0.01), optimizer_of(critic, gpu, 0.01)
    data = batches(1, lambda: 0.05)
    for _ in range(num_steps()):
        rows, _labels = next(data)
        of_critic.zero_grad()
        fake = maker(torch.randn(8, NUM_FEATURES))
        critic_loss = binary_cross_entropy_with_logits(critic(rows), torch.ones(8, 1))
        critic_loss = critic_loss + binary_cross_entropy_with_logits(critic(fake.detach()), torch.zeros(8, 1))
        critic_loss.backward()  # type: ignore[no-untyped-call]  # as above
        of_critic.step()
        of_maker.zero_grad()
        maker_loss = binary_cross_entropy_with_logits(critic(fake), torch.ones(8, 1))
        maker_loss.backward()  # type: ignore[no-untyped-call]  # as above
        of_maker.step()
        gpu.step(critic_loss.detach() + maker_loss.detach())


def accumulation() -> None:
    """Steps of four microbatches with clipped gradients, and evaluations between them."""
    gpu = Gpu()
    model = classifier(gpu, 0.03, 0.06)
    optimizer = optimizer_of(model, gpu, 0.02)
    data, held_out = batches(1, lambda: 0.01), batches(2, lambda: 0.0)
    for step in range(num_steps()):
        total = 0.0
        for _ in range(4):
            rows, labels = next(data)
            loss = cross_entropy(model(rows), labels) / 4
            loss.backward()  # type: ignore[no-untyped-call]  # as above
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        gpu.step(total)
        if step % _EVALUATED_EVERY == _EVALUATED_EVERY - 1:
            model.eval()
            with gpu.pause():
                for _ in range(25):
                    model(next(held_out)[0])
            model.train()


def rl() -> None:
    """Rounds of generation and training; in every second round another model generates first."""
    gpu = Gpu()
    policy = classifier(gpu, 0.03, 0.06)
    reference = copy.deepcopy(policy).requires_grad_(requires_grad=False)
    optimizer = optimizer_of(policy, gpu, 0.02)
    data = batches(1, lambda: 0.04)
    for step in range(num_steps()):
        if step % _ROUND_STEPS == 0:
            models = (policy, reference) if step // _ROUND_STEPS % 2 else (reference, policy)
            policy.eval()
            with gpu.pause():
                for model in models:
                    for _ in range(60):
                        model(torch.zeros(4, NUM_FEATURES))
            policy.train()
        rows, labels = next(data)
        loss = cross_entropy(policy(rows), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # as above
        optimizer.step()
        optimizer.zero_grad()
        gpu.step(loss.detach())


KINDS = {kind.__name__: kind for kind in (ddp, fsdp2, gan, accumulation, rl)}

if __name__ == "__main__":
    KINDS[sys.argv[1]]()
    print("done")
