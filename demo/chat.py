"""The chat load of `make serve-demo`: conversations whose histories grow."""

from dataclasses import dataclass, field

from demo.documents import text
from servers.vllm import NOT_STORED, ChatAnswer, VLLMServer

PAGE_TOKENS = 64
# Maximum number of conversations that are open at the same time.
CONVERSATIONS = 4
TURNS = 5
ANSWER_TOKENS = 16
# Characters of a text of about one page: a text has more than 0.9 tokens per character.
PAGE_CHARACTERS = 70
OPENING_PAGES, TURN_PAGES = 6, 2
ALONE_PAGES = 10
# Upper bound of the tokens of a prompt and its answer. The factor 2 leaves room for the answers in
# a history, which have up to three tokens per generated token, because the model's weights are
# random.
MAX_TOKENS = 2 * PAGE_TOKENS * (OPENING_PAGES + (TURNS - 1) * TURN_PAGES)


@dataclass
class Conversation:
    name: str
    seed: int
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def turn(self) -> int:
        """The number of the next turn, from 1."""
        return len(self.messages) // 2 + 1


@dataclass
class ChatLoad:
    """Sends requests, one at a time. `asked`: the ids that vLLM returned, in order. `alone`: the id
    of a prompt that was asked once, before the conversations. `not_stored`: the id of a prompt that
    opted out of the store.
    """

    server: VLLMServer
    asked: list[str] = field(default_factory=list)
    alone: str = ""
    not_stored: str = ""
    _active: list[Conversation] = field(default_factory=list)
    _begun: int = 0

    def begin(self) -> None:
        """Asks the prompts `alone` and `not_stored`."""
        self.alone = self._ask(Conversation("asked-once", 1), ALONE_PAGES).request_id
        private = Conversation("not-stored", 2)
        self.not_stored = self._ask(private, ALONE_PAGES, NOT_STORED).request_id

    def next_turn(self) -> None:
        """Begins a conversation while fewer than `CONVERSATIONS` are open; otherwise continues the
        conversation that waits longest. A conversation ends after `TURNS` turns.
        """
        if len(self._active) < CONVERSATIONS:
            self._begun += 1
            current = Conversation(f"conversation-{self._begun}", 100 * self._begun)
        else:
            current = self._active.pop(0)
        self._ask(current, OPENING_PAGES if current.turn == 1 else TURN_PAGES)
        if current.turn <= TURNS:
            self._active.append(current)

    def _ask(
        self, current: Conversation, pages: int, options: dict[str, bool] | None = None
    ) -> ChatAnswer:
        turn = current.turn
        said = text(current.seed + turn, pages * PAGE_CHARACTERS)
        current.messages.append({"role": "user", "content": said})
        request_id = f"{current.name}-turn-{turn}"
        answer = self.server.chat(current.messages, ANSWER_TOKENS, request_id, options)
        current.messages.append({"role": "assistant", "content": answer.text})
        self.asked.append(answer.request_id)
        return answer
