"""Several users; each asks several rounds of questions about a separate context after a shared
system prompt.

The pattern and flags of LMCache's `multi-round-qa.py`: every user asks a question every `num_users
/ qps` seconds, or when the previous answer arrives if that is later.
"""

import argparse
import asyncio
from dataclasses import dataclass

from ritornello.bench.driver import Driver, Request
from ritornello.bench.prompts import Source, joined


@dataclass(frozen=True)
class MultiRoundQA:
    """Lengths are in tokens. Without `time_s`, each of `num_users` users asks all rounds. With
    `time_s`, new users replace finished users until `time_s` seconds have passed, and `ramp_up`
    lets some of the first `num_users` users ask fewer rounds (`rounds_of`). A user's rounds go to
    the servers round robin.
    """

    source: Source
    num_users: int
    num_rounds: int
    qps: float
    shared_system_prompt: int
    user_history_prompt: int
    answer_len: int
    question_len: int = 24
    time_s: float | None = None
    ramp_up: bool = True
    init_user_id: int = 0

    @classmethod
    def flags(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--num-users", type=int, required=True, help="concurrent users")
        add("--num-rounds", type=int, required=True, help="questions per user")
        add("--qps", type=float, required=True, help="questions per second, of all users")
        add(
            "--shared-system-prompt",
            type=int,
            required=True,
            help="tokens of the system prompt with which all prompts begin",
        )
        add("--user-history-prompt", type=int, required=True, help="tokens of a user's own context")
        add("--answer-len", type=int, required=True, help="tokens of an answer")
        add("--question-len", type=int, default=24, help="tokens of a question (24)")
        add(
            "--time",
            type=float,
            help="seconds of the run (default: until each user has asked all rounds)",
        )
        add(
            "--disable-ramp-up",
            action="store_true",
            help="with --time: let the first --num-users users ask all rounds (default: the later "
            "of these users ask fewer rounds)",
        )
        add(
            "--init-user-id",
            type=int,
            default=0,
            help="number of the first user, on which the prompts depend (0)",
        )

    @property
    def requests(self) -> int | None:
        return self.num_users * self.num_rounds if self.time_s is None else None

    @property
    def gap_s(self) -> float:
        """Minimum seconds between two questions of one user."""
        return self.num_users / self.qps

    def rounds_of(self, slot: int) -> int:
        """Returns how many rounds the first user of a slot asks. A slot is one of `num_users`
        sequences of users; a user begins when the previous user of the slot has finished. The
        result is `num_rounds` or, with `time_s` and `ramp_up`, a number that falls with the number
        of the slot, so that not all users finish at the same time.
        """
        if self.time_s is None or not self.ramp_up:
            return self.num_rounds
        return self.num_rounds - slot * self.num_rounds // self.num_users

    async def run(self, driver: Driver) -> None:
        async with asyncio.TaskGroup() as group:
            for slot in range(self.num_users):
                group.create_task(self._run_user_slot(driver, slot))

    async def _run_user_slot(self, driver: Driver, slot: int) -> None:
        """Runs users one after another until `time_s` has passed; without `time_s`, one user."""
        user, rounds = slot, self.rounds_of(slot)
        begin = slot / self.qps
        # Check the clock and `begin`: a user that finds `time_s` over asks no question and leaves
        # `begin` unchanged, so a check of `begin` alone would never end the loop.
        while self.time_s is None or max(begin, driver.now()) < self.time_s:
            begin = await self._ask_rounds(driver, user, rounds, begin)
            if self.time_s is None:
                return
            user, rounds = user + self.num_users, self.num_rounds

    async def _ask_rounds(self, driver: Driver, user: int, rounds: int, begin: float) -> float:
        """Asks a user's questions, the first at `begin`. Returns the time at which the next user
        may begin. Times are seconds since the run began.
        """
        name = f"user {self.init_user_id + user}"
        history = joined(
            self.source.piece("system", self.shared_system_prompt),
            self.source.piece(name, self.user_history_prompt),
        )
        known = 0
        for number in range(rounds):
            await driver.until(begin)
            if self.time_s is not None and driver.now() >= self.time_s:
                break
            begin = max(begin, driver.now()) + self.gap_s
            question = self.source.piece(f"{name} question {number}", self.question_len)
            prompt = joined(history, question)
            request = Request(user, number, user + number, prompt, known, self.answer_len)
            record = await driver.send(request)
            if record.error:
                break
            history, known = joined(prompt, record.answer), record.known_tokens
        return begin
