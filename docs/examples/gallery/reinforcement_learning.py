"""On-policy reinforcement learning: observers play a game, and one agent chooses all actions and learns from them.

python docs/examples/gallery/reinforcement_learning.py

A ball falls from a random column, and a paddle moves left, right, or stays; a caught ball is a reward of 1. The
observers have no policy: they call the agent for each action, which it draws from a generator for each of them, so that
their order does not matter. After each round the agent makes one step of REINFORCE (Williams, 1992).
docs/examples/rpc/reinforce.py answers all observers in one batch, and plays games of gymnasium.
"""

import torch
from torch import nn

import unisono as un

COLUMNS, ROWS = 5, 5


@un.rpc.expose
class Agent:
    def __init__(self, observers):
        torch.manual_seed(0)
        self._policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))
        self._optimizer = torch.optim.Adam(self._policy.parameters(), lr=0.02)
        self._draws = {observer: torch.Generator().manual_seed(observer) for observer in observers}
        self._chances = {observer: [] for observer in observers}

    def act(self, observer, state):
        """Return -1, 0 or 1: where the paddle moves."""
        chances = self._policy(state).log_softmax(0)
        action = int(torch.multinomial(chances.exp(), 1, generator=self._draws[observer]))
        self._chances[observer].append(chances[action])
        return action - 1

    def learn(self, rewards):
        """Make one step; `rewards` has a list for each observer, with a number for each game."""
        scores, advantages = [], []
        for observer, won in rewards.items():
            scores += self._chances[observer]
            advantages.append(torch.tensor(won).repeat_interleave(ROWS))
            self._chances[observer] = []
        advantage = torch.cat(advantages)
        self._optimizer.zero_grad()
        (-(torch.stack(scores) * (advantage - advantage.mean())).mean()).backward()
        self._optimizer.step()


@un.rpc.expose
def play(agent, observer, seed, games):
    """Play some games, and return the reward of each; `agent` is a reference, and its methods run on rank 0."""
    generator, rewards = torch.Generator().manual_seed(seed), []
    for _ in range(games):
        ball, paddle = torch.randint(COLUMNS, (2,), generator=generator).tolist()
        for height in range(ROWS, 0, -1):
            state = torch.tensor([float(ball - paddle), height / ROWS])
            paddle = min(COLUMNS - 1, max(0, paddle + agent.rpc_sync().act(observer, state)))
        rewards.append(float(ball == paddle))
    return rewards


def run(comm, rounds=50, games=16):
    """Return the share of balls caught in each round, on rank 0."""
    un.rpc.init(comm)
    curve, observers = [], range(1, comm.size)
    if comm.rank == 0:
        agent = un.rpc.RRef(Agent(observers))
        for number in range(rounds):
            playing = {k: un.rpc.rpc_async(k, play, (agent, k, rounds * k + number, games)) for k in observers}
            rewards = {observer: future.wait() for observer, future in playing.items()}
            agent.local_value().learn(rewards)
            curve.append(sum(map(sum, rewards.values())) / (games * len(observers)))
            if number % 10 == 9:
                print(f"round {number + 1}: {sum(curve[-5:]) / 5:.0%} of the balls are caught", flush=True)
    un.rpc.shutdown()
    return curve


if __name__ == "__main__":
    un.launch(run, 3)
