"""On-policy reinforcement learning: many observers play, one agent chooses for all of them and learns.

Each observer has an environment of its own, and no policy: it asks the agent for every action. The agent waits until
all observers that still play have asked, and runs the policy once for all of them (batched, by an asynchronous
function). After each round it makes one step of REINFORCE (Williams, 1992) with the mean return as baseline.

The environment is "catch": a ball falls from a random column of a small field; a paddle on the ground moves left, right
or stays; the reward is 1 for a ball that is caught, else 0. Playing at random catches about one ball in four; after 60
rounds the agent catches more than nine in ten, for any seed. With `--env CartPole-v1` (or another of gymnasium's
with few discrete actions) it is gymnasium's, if that is installed.
"""

from __future__ import annotations

import argparse
import threading
from typing import Any, Protocol

import torch
from torch import nn
from torch.futures import Future

import unisono as un
from unisono import rpc

ROWS, COLUMNS = 6, 5


class Environment(Protocol):
    """Interface of an environment."""

    observations: int
    actions: int

    def reset(self) -> torch.Tensor: ...

    def step(self, action: int) -> tuple[torch.Tensor, float, bool]: ...


class Catch:
    """A falling ball and a paddle."""

    observations, actions = 2 * COLUMNS, 3

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def reset(self) -> torch.Tensor:
        self._ball, self._paddle = torch.randint(COLUMNS, (2,), generator=self._generator).tolist()
        self._height = ROWS - 1
        return self._seen()

    def step(self, action: int) -> tuple[torch.Tensor, float, bool]:
        self._paddle = min(COLUMNS - 1, max(0, self._paddle + action - 1))
        self._height -= 1
        down = self._height == 0
        return self._seen(), float(down and self._ball == self._paddle), down

    def _seen(self) -> torch.Tensor:
        """Horizontal offset of the ball, one-hot, and its height."""
        seen = torch.zeros(self.observations)
        seen[COLUMNS - 1 + self._ball - self._paddle] = 1.0
        seen[-1] = self._height / ROWS
        return seen


class Gymnasium:
    """An environment of gymnasium's."""

    def __init__(self, name: str, seed: int) -> None:
        import gymnasium

        self._env: Any = gymnasium.make(name)
        self._seed: int | None = seed
        self.observations, self.actions = self._env.observation_space.shape[0], int(self._env.action_space.n)

    def reset(self) -> torch.Tensor:
        seen, _ = self._env.reset(seed=self._seed)
        self._seed = None
        return torch.as_tensor(seen, dtype=torch.float32)

    def step(self, action: int) -> tuple[torch.Tensor, float, bool]:
        seen, reward, ended, cut, _ = self._env.step(action)
        return torch.as_tensor(seen, dtype=torch.float32), float(reward), ended or cut


def environment(name: str, seed: int) -> Environment:
    return Catch(seed) if name == "catch" else Gymnasium(name, seed)


@rpc.expose
class Observer:
    """Player of an environment, on each rank but the agent's."""

    def __init__(self, env: str, seed: int) -> None:
        self._id = rpc.get_worker_info().id
        self._env = environment(env, 1000 * seed + self._id)

    def play(self, agent: rpc.RRef[Agent], episodes: int) -> list[float]:
        """Play some episodes, and return the total reward of each."""
        totals = []
        for _ in range(episodes):
            seen, total, over = self._env.reset(), 0.0, False
            while not over:
                action = agent.rpc_sync().choose(self._id, seen)
                seen, reward, over = self._env.step(action)
                total += reward
                agent.rpc_sync().reward(self._id, reward, over)
            totals.append(total)
        agent.rpc_sync().rest(self._id)
        return totals


@rpc.expose
class Agent:
    """Policy: chooses actions, and learns."""

    def __init__(self, env: str, seed: int, observers: int, lr: float) -> None:
        torch.manual_seed(seed)
        like = environment(env, seed)
        self._policy = nn.Sequential(nn.Linear(like.observations, 64), nn.Tanh(), nn.Linear(64, like.actions))
        self._optimizer = torch.optim.Adam(self._policy.parameters(), lr=lr)
        self._generator = torch.Generator().manual_seed(seed)
        self._everyone = range(1, observers + 1)
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._playing = set(self._everyone)
        self._asked: dict[int, tuple[torch.Tensor, Future[int]]] = {}
        self._logs: dict[int, list[torch.Tensor]] = {k: [] for k in self._everyone}
        self._rewards: dict[int, list[tuple[float, bool]]] = {k: [] for k in self._everyone}

    @rpc.async_execution
    def choose(self, observer: int, seen: torch.Tensor) -> Future[int]:
        """Return an action, when all playing observers have sent a state."""
        answer: Future[int] = Future()
        with self._lock:
            self._asked[observer] = seen, answer
            self._answer_if_complete()
        return answer

    def reward(self, observer: int, reward: float, over: bool) -> None:
        """Report the reward of the last action, and whether it ended the episode."""
        self._rewards[observer].append((reward, over))

    def rest(self, observer: int) -> None:
        """Stop this observer until the next round."""
        with self._lock:
            self._playing.discard(observer)
            self._answer_if_complete()

    def _answer_if_complete(self) -> None:
        if not self._asked or self._asked.keys() != self._playing:
            return
        order = sorted(self._asked)
        scores = self._policy(torch.stack([self._asked[k][0] for k in order])).log_softmax(1)
        actions = torch.multinomial(scores.detach().exp(), 1, generator=self._generator).flatten()
        asked, self._asked = self._asked, {}
        for row, k in enumerate(order):
            self._logs[k].append(scores[row, actions[row]])
        for row, k in enumerate(order):
            asked[k][1].set_result(int(actions[row]))

    def learn(self) -> None:
        """Make one step from all episodes since the last step."""
        returns, logs = [], []
        for k in self._everyone:
            to_come = 0.0
            backwards = []
            for reward, over in reversed(self._rewards[k]):
                to_come = reward + (0.0 if over else 0.99 * to_come)
                backwards.append(to_come)
            returns += reversed(backwards)
            logs += self._logs[k]
        advantage = torch.tensor(returns)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        self._optimizer.zero_grad()
        (-(torch.stack(logs) * advantage).mean()).backward()
        self._optimizer.step()
        self._begin()


def run(
    comm: un.Communicator, seed: int = 0, rounds: int = 60, episodes: int = 16, env: str = "catch", lr: float = 0.02
) -> list[float]:
    """The mean reward of an episode, round by round: the learning curve, on rank 0."""
    rpc.init(comm, name="agent" if comm.rank == 0 else f"observer{comm.rank}")
    curve: list[float] = []
    if comm.rank == 0:
        agent = rpc.RRef(Agent(env, seed, comm.size - 1, lr))
        observers = [rpc.remote(rank, Observer, (env, seed)) for rank in range(1, comm.size)]
        for number in range(rounds):
            played = [observer.rpc_async(timeout=600).play(agent, episodes) for observer in observers]
            totals = [total for future in played for total in future.wait()]
            agent.local_value().learn()
            curve.append(sum(totals) / len(totals))
            if number % 10 == 9:
                print(f"round {number + 1}: mean reward {curve[-1]:.2f}", flush=True)
    rpc.shutdown()
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--observers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--env", default="catch")
    given = parser.parse_args()
    settings = {"seed": given.seed, "rounds": given.rounds, "env": given.env}
    un.launch(run, 1 + given.observers, kwargs=settings)
