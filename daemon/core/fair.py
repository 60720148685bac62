"""Fair share: deficit round robin on tokens between the namespaces that have requests waiting.

Owns an account per namespace: the round of its next turn and what it may take in it. Must never look at memory or rows.
A turn begins with one quantum; a request may start while any of it is left, and what it takes beyond is paid back in
turns left out, so its size need not be known before. A prompt token is charged when it is first computed, an output
token when its request leaves its row; what the cache gave, or a retraction makes necessary again, costs nothing.

    account     round of its next turn, place among those of that round, credit left in it: 1 to quantum
    a charge    credit - tokens; below 1: so many rounds later that it is from 1 to quantum again, behind those there
    newcomer    the round after the newest that began, behind those there: rounds end, whoever comes

Bound: of two namespaces that both had requests waiting all the time and were not passed over, none is charged more than

    4 quanta + 2 x (the longest prompt + the most output tokens that requests of one of them have uncharged at once)

beyond the other, over any time. A namespace without waiting requests keeps a debt, never a credit.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from daemon.core.ordered_heap import OrderedHeap
from daemon.core.requests import Request

DEBTS_MAX = 65_536  # namespaces without waiting requests whose debts are kept; the smallest debts go first
PASSED_OVER = -1  # what is sent to a walk for a request that does not start


@dataclass(slots=True, eq=False)
class Account:
    """One namespace: `round` and `serial` say when its next turn is, `credit` (tokens) is what it may take then."""

    namespace: str
    round: int
    serial: int
    credit: int
    waiting: OrderedHeap[Request] = field(default_factory=OrderedHeap)

    @property
    def key(self) -> tuple[int, int]:
        """When its next turn is."""
        return (self.round, self.serial)


def _key(request: Request) -> tuple[int, int]:
    """Within a namespace: by priority, equal ones as they came."""
    return (-request.priority, request.number)


class FairShare:
    """The policy `fair`. Raises ValueError for a quantum below one token."""

    def __init__(self, quantum_tokens: int) -> None:
        if quantum_tokens < 1:
            raise ValueError(f"fair_quantum_tokens must be at least 1, not {quantum_tokens}")
        self._quantum = quantum_tokens
        self._accounts: dict[str, Account] = {}
        self._turns: OrderedHeap[Account] = OrderedHeap()  # of namespaces that have requests waiting
        self._debts: OrderedHeap[Account] = OrderedHeap()  # of the others
        self._round = 0  # the newest that began
        self._serial = 0

    def add(self, request: Request) -> None:
        """A request waits; its namespace gets a turn if it had none."""
        account = self._account(request.group.namespace)
        if not len(account.waiting):
            self._debts.remove(account.key)
            self._turns.add(account.key, account)
        account.waiting.add(_key(request), request)

    def remove(self, request: Request) -> None:
        """A request waits no longer; a namespace without any has no turn."""
        account = self._accounts[request.group.namespace]
        assert account.key in self._turns, "a namespace with a request waiting has a turn"
        account.waiting.remove(_key(request))
        if not len(account.waiting):
            self._turns.remove(account.key)
            self._debts.add(account.key, account)
            self._forget()

    def began(self, namespace: str, tokens: int) -> None:
        """A request of the namespace started and takes so many tokens.

        In its turn, or before others for its age: rounds in which those have turns left do not end with that.
        """
        assert tokens >= 0, "what was computed is charged, nothing is given back"
        account = self._accounts.get(namespace)
        if account is not None:
            waits = self._turns.first().round if len(self._turns) else account.round
            self._round = max(self._round, min(account.round, waits))
        self.charge(namespace, tokens)
        self._forget()

    def charge(self, namespace: str, tokens: int) -> None:
        """Tokens that were produced for a namespace, whether it has requests waiting or not."""
        if tokens <= 0:
            return
        account = self._account(namespace)
        account.credit -= tokens
        rounds = self._rounds(account.credit)
        if rounds:
            place = self._turns if len(account.waiting) else self._debts
            place.remove(account.key)
            account.credit += rounds * self._quantum
            account.round, account.serial = account.round + rounds, self._next_serial()
            place.add(account.key, account)
        assert 1 <= account.credit <= self._quantum, "a turn begins with at most a quantum"

    def walk(self) -> Generator[Request, int | None, None]:
        """Candidates in the order of turns; what each takes is sent back, `PASSED_OVER` when it does not start.

        Behind one that was passed over (nothing sent says the same) other namespaces are asked first. Changes nothing.
        """
        turns, serial = self._turns.walk(), self._serial
        again: list[tuple[int, int, int, Iterator[Request]]] = []  # serials differ: nothing behind them is compared
        upcoming = next(turns, None)
        while upcoming is not None or again:
            if upcoming is not None and (not again or upcoming.key < again[0][:2]):
                at, place, credit, requests = (*upcoming.key, upcoming.credit, upcoming.waiting.walk())
                upcoming = next(turns, None)
            else:
                at, place, credit, requests = heapq.heappop(again)
            request = next(requests, None)
            if request is None:
                continue
            tokens = yield request
            rounds = 1
            if tokens is not None and tokens != PASSED_OVER:
                credit -= tokens
                rounds = self._rounds(credit)
                credit += rounds * self._quantum
            if rounds:
                serial += 1
                place = serial
            heapq.heappush(again, (at + rounds, place, credit, requests))

    def content(self) -> list[object]:
        """What the state digest covers beside the requests that wait."""
        accounts = [self._accounts[name] for name in sorted(self._accounts)]
        return [self._round, self._serial, [[one.namespace, *one.key, one.credit] for one in accounts]]

    def _account(self, namespace: str) -> Account:
        """The namespace's account; one without waiting requests has no credit of an earlier round."""
        account = self._accounts.get(namespace)
        if account is None:
            account = Account(namespace, self._round + 1, self._next_serial(), self._quantum)
            self._accounts[namespace] = account
            self._debts.add(account.key, account)
        elif not len(account.waiting) and account.round <= self._round:
            self._debts.remove(account.key)
            account.round, account.serial, account.credit = self._round + 1, self._next_serial(), self._quantum
            self._debts.add(account.key, account)
        return account

    def _rounds(self, credit: int) -> int:
        """How many quanta make a credit positive again."""
        return 0 if credit > 0 else -credit // self._quantum + 1

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _forget(self) -> None:
        """Debts of rounds that began are paid."""
        debts = self._debts
        while len(debts) and (debts.first_key()[0] <= self._round or len(debts) > DEBTS_MAX):
            account = debts.remove(debts.first_key())
            del self._accounts[account.namespace]
