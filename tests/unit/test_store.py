from __future__ import annotations

import dataclasses
import os
import random
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from mmap import mmap
from types import FrameType
from typing import Any

import pytest

from gpuworker.weights.store import Entry, Store, StoreError
from tests.unit.children import exit_code, run_child, start_child

# Python 3.12 and later warn of forks in a process with threads, which torch may have started.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

MOST_FDS = 253
NOBODY = 65534


def open_fds() -> set[int]:
    """The descriptors open now; not the one that lists them."""
    found = {int(name) for name in os.listdir("/proc/self/fd")}
    return {fd for fd in found if os.path.exists(f"/proc/self/fd/{fd}")}


@pytest.fixture(autouse=True)
def _no_fd_leaks() -> Iterator[None]:
    before = open_fds()
    yield
    assert open_fds() - before == set()


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()


def memfd(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def content_of(generation: int, number: int) -> bytes:
    return f"generation {generation}, descriptor {number};".encode() * 20


def entry(key: str, generation: int = 1, sizes: tuple[int, ...] = ()) -> Entry:
    return Entry(f"{key} of {generation}", key, generation, sizes)


def publish(store: Store, key: str, generation: int = 1, count: int = 2) -> None:
    """Publish descriptors of which the content tells the generation; none of them stays open here."""
    fds = [memfd(content_of(generation, number)) for number in range(count)]
    try:
        store.publish(entry(key, generation, (count,)), fds)
    finally:
        for fd in fds:
            os.close(fd)


def check(store: Store, key: str) -> Entry:
    """Find `key`, and check that the descriptors are those of its entry."""
    found = store.find(key)
    assert found is not None
    entry, fds = found
    contents = [os.pread(fd, 10_000, 0) for fd in fds]
    for fd in fds:
        os.close(fd)
    assert contents == [content_of(entry.generation, number) for number in range(entry.sizes[0])]
    return entry


def publish_fds(store: Store, key: str, count: int) -> None:
    """Publish `count` copies of one descriptor."""
    fd = memfd(b"x")
    try:
        store.publish(entry(key), [fd] * count)
    finally:
        os.close(fd)


def messages(store: Store) -> list[bytes]:
    """All messages queued; the store is empty afterwards."""
    found = []
    while True:
        try:
            found.append(store._receiver.recv(10**6))
        except BlockingIOError:
            return found


# What it does


def test_a_new_store_is_empty(store: Store) -> None:
    assert store.find("a") is None
    assert store.entries() == []


def test_the_sockets_are_close_on_exec_and_never_block(store: Store) -> None:
    for end in (store._sender, store._receiver):
        assert not os.get_inheritable(end.fileno())
        assert not os.get_blocking(end.fileno())


def test_a_default_timeout_of_the_app_does_not_matter() -> None:
    socket.setdefaulttimeout(30)
    try:
        store = Store()
    finally:
        socket.setdefaulttimeout(None)
    assert store.find("a") is None
    assert not os.get_blocking(store._receiver.fileno())
    store.close()


def test_find_gives_what_was_published(store: Store) -> None:
    publish(store, "a")
    publish(store, "b", count=5)
    assert check(store, "a") == Entry("a of 1", "a", 1, (2,))
    assert check(store, "b") == Entry("b of 1", "b", 1, (5,))
    assert store.find("c") is None
    assert store.entries() == [entry("a", 1, (2,)), entry("b", 1, (5,))]


def test_an_entry_without_descriptors(store: Store) -> None:
    store.publish(entry("a"), [])
    publish(store, "b")
    assert store.find("a") == (entry("a"), [])
    check(store, "b")


@pytest.mark.parametrize("text", ["", "Modèle №1 🔥", 'a "quoted"\n\0 name', "\udcff"])
def test_any_text_is_a_name(store: Store, text: str) -> None:
    store.publish(Entry(text, "a", 2**40, (0, 2**40)), [])
    assert store.entries() == [Entry(text, "a", 2**40, (0, 2**40))]


def test_found_descriptors_are_copies_and_close_on_exec(store: Store) -> None:
    publish(store, "a")
    found = [store.find("a") for _ in range(2)]
    fds = [fd for item in found if item for fd in item[1]]
    assert len(set(fds)) == 4
    for fd in fds:
        assert not os.get_inheritable(fd)
        os.close(fd)
    check(store, "a")


def test_find_opens_only_the_descriptors_of_its_entry(store: Store) -> None:
    for key in "abc":
        publish(store, key, count=3)
    before = open_fds()
    found = store.find("b")
    assert found is not None
    assert open_fds() - before == set(found[1])
    for fd in found[1]:
        os.close(fd)


def test_the_same_key_replaces(store: Store) -> None:
    publish(store, "a")
    publish(store, "b")
    publish(store, "a", generation=2, count=3)
    assert check(store, "a") == entry("a", 2, (3,))
    check(store, "b")
    assert len(store.entries()) == 2


def test_update_changes_entries_and_keeps_descriptors(store: Store) -> None:
    publish(store, "a", count=3)
    publish_fds(store, "b", 2)
    store.update(lambda old: dataclasses.replace(old, generation=7) if old.key == "b" else old)
    check(store, "a")
    found = store.find("b")
    assert found is not None
    assert found[0].generation == 7
    assert [os.pread(fd, 10, 0) for fd in found[1]] == [b"x", b"x"]
    for fd in found[1]:
        os.close(fd)


def test_update_drops_entries(store: Store) -> None:
    for key in "abc":
        publish(store, key)
    store.update(lambda old: None if old.key == "b" else old)
    assert store.find("b") is None
    check(store, "a")
    check(store, "c")
    store.update(lambda old: None)
    assert store.entries() == []
    publish(store, "d")
    check(store, "d")


def test_update_of_an_empty_store_does_nothing(store: Store) -> None:
    store.update(lambda old: None)
    assert messages(store) == []


def test_update_sends_nothing_when_nothing_changes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, "a")
    monkeypatch.setattr(Store, "_send", None)
    store.update(lambda old: old)
    check(store, "a")


def test_a_change_that_raises_changes_nothing(store: Store) -> None:
    def change(old: Entry) -> Entry | None:
        if old.key == "b":
            raise ZeroDivisionError
        return None

    publish(store, "a")
    publish(store, "b")
    with pytest.raises(ZeroDivisionError):
        store.update(change)
    check(store, "a")
    check(store, "b")


def test_a_descriptor_that_is_not_open_changes_nothing(store: Store) -> None:
    publish(store, "a")
    with pytest.raises(OSError, match="Bad file descriptor"):
        store.publish(entry("b"), [10**6])
    check(store, "a")
    assert len(messages(store)) == 1


def test_one_message_is_left_after_each_change(store: Store) -> None:
    for generation in range(5):
        publish(store, "a", generation)
        store.update(lambda old: dataclasses.replace(old, name="new"))
    assert len(messages(store)) == 1


# Between processes


def test_what_a_dead_process_published_is_found_by_another(store: Store) -> None:
    for key in "ab":
        run_child(lambda key=key: publish(store, key, count=4))
    for key in "ab":
        run_child(lambda key=key: check(store, key))
        check(store, key)


def is_freed(read_end: int, seconds: float) -> bool:
    """Whether all write ends of a pipe are closed: the last of them is parked."""
    return bool(select.select([read_end], [], [], seconds)[0])


def test_a_dropped_entry_is_freed(store: Store) -> None:
    read_end, write_end = os.pipe()
    store.publish(entry("a"), [write_end])
    os.close(write_end)
    publish(store, "b")
    assert not is_freed(read_end, 0)
    run_child(lambda: store.update(lambda old: None if old.key == "a" else old))
    assert is_freed(read_end, 5)
    os.close(read_end)


def test_the_last_process_that_dies_frees_all() -> None:
    store = Store()
    read_end, write_end = os.pipe()
    store.publish(entry("a"), [write_end])
    os.close(write_end)
    children = [start_child(signal.pause) for _ in range(3)]
    store.close()
    for child in children:
        assert not is_freed(read_end, 0.02)
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL
    assert is_freed(read_end, 5)
    os.close(read_end)


def test_readers_never_see_nothing_nor_anything_wrong(store: Store) -> None:
    rounds = [mmap(-1, 8) for _ in range(2)]
    stop = mmap(-1, 1)

    def read(counter: mmap) -> None:
        newest = 0
        for count in range(200_000):
            generation = check(store, "a").generation
            assert generation >= newest  # old content never comes back
            newest = generation
            check(store, "b")
            assert {old.key for old in store.entries()} == {"a", "b"}
            counter[:] = (count + 1).to_bytes(8, "little")
            if stop[0]:
                return

    publish(store, "b")
    publish(store, "a")
    before = open_fds()
    readers = [start_child(lambda counter=counter: read(counter)) for counter in rounds]
    generation, end = 1, time.monotonic() + 20
    while generation <= 200 or (
        any(int.from_bytes(counter[:], "little") < 300 for counter in rounds) and time.monotonic() < end
    ):
        generation += 1
        publish(store, "a", generation, count=1 + generation % 3)
        store.update(lambda old: dataclasses.replace(old, name=old.name[::-1]))
    stop[0] = 1
    assert [exit_code(reader) for reader in readers] == [0, 0]
    assert check(store, "a").generation == generation
    assert open_fds() == before
    assert all(int.from_bytes(counter[:], "little") >= 300 for counter in rounds)


# Writers that die


WRITING = {function.__code__ for function in (Store.publish, Store.update, Store._replace, Store._send)}
WRITING |= {function.__code__ for function in (Store._keep_newest, Store._queued_bytes, Store._front_bytes)}


def dies_at_line(number: int, action: Callable[[], object]) -> Callable[[], None]:
    """`action`, killed when it reaches line `number` of those that it runs in functions that write."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal number
        if frame.f_code not in WRITING:
            return None
        if event == "line":
            number -= 1
            if number == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    def run() -> None:
        sys.settrace(trace)
        action()

    return run


Write = Callable[[Store], None]


def publish_another(store: Store) -> None:
    publish(store, "c")


def update_another(store: Store) -> None:
    store.update(lambda old: dataclasses.replace(old, name="new") if old.key == "b" else old)


def check_next_writer(store: Store, write: Write = publish_another) -> bool:
    """After a writer died that had to change "a of 1" to "a of 2": a reader, the next writer and the queue.

    :return: whether it died half-way, with both messages queued.
    """
    half_way = store._queued_bytes() > store._front_bytes()
    before = check(store, "a").name
    write(store)
    assert check(store, "a").name == ("a of 2" if half_way else before)  # what was sent counts
    check(store, "b")
    assert store._queued_bytes() == store._front_bytes()
    return half_way


def publish_a(store: Store) -> None:
    publish(store, "a", 2)


def update_a(store: Store) -> None:
    store.update(lambda old: dataclasses.replace(old, name=f"{old.key} of 2"))


@pytest.mark.parametrize(("write", "write_next"), [(publish_a, update_another), (update_a, publish_another)])
def test_a_writer_may_die_at_every_line(store: Store, write: Write, write_next: Write) -> None:
    seen = set()
    code = -signal.SIGKILL
    line = 0
    while code == -signal.SIGKILL:
        line += 1
        publish(store, "b")
        publish(store, "a")
        code = exit_code(start_child(dies_at_line(line, lambda: write(store))))
        name = next(old.name for old in store.entries() if old.key == "a")
        seen.add((check_next_writer(store, write_next), name))
    assert code == 0
    assert line > 20
    assert seen == {(False, "a of 1"), (True, "a of 1"), (False, "a of 2")}


def test_the_first_writer_may_die_at_every_line() -> None:
    seen = set()
    code = -signal.SIGKILL
    line = 0
    while code == -signal.SIGKILL:
        line += 1
        store = Store()
        code = exit_code(start_child(dies_at_line(line, lambda store=store: publish(store, "a"))))
        before = store.entries()
        publish(store, "b")
        assert store.entries() == [*before, check(store, "b")]
        if before:
            check(store, "a")
        seen.add(len(before))
        assert len(messages(store)) == 1
        store.close()
    assert code == 0
    assert seen == {0, 1}


def test_writers_killed_at_any_time(store: Store) -> None:
    dice = random.Random(3)

    def write() -> None:
        while True:
            publish(store, "a", 2)
            store.update(lambda old: dataclasses.replace(old, name=old.name + " new") if old.key == "b" else old)
            publish(store, "b")

    for _ in range(100):
        publish(store, "a")
        publish(store, "b")
        child = start_child(write)
        time.sleep(dice.uniform(0.0002, 0.006))
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL
        check_next_writer(store)
        assert len(store.entries()) == 3
    assert len(messages(store)) == 1


# Limits


def leave_room_for(count: int) -> None:
    """Lower RLIMIT_NOFILE so that `count` more descriptors can be opened."""
    used = open_fds()
    limit = free = 0
    while free < count or limit in used:
        free += limit not in used
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def lift_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@pytest.mark.parametrize("action", ["find", "publish", "update"])
@pytest.mark.parametrize("room", [0, 1, 19, 20])
def test_a_process_without_room_for_the_descriptors(store: Store, room: int, action: str) -> None:
    publish(store, "a", count=10)
    publish(store, "b", count=10)
    actions: dict[str, Callable[[], object]] = {
        "find": lambda: store.find("c"),
        "publish": lambda: store.publish(entry("c"), [0]),
        "update": lambda: store.update(lambda old: None),
    }

    def act() -> None:
        before = open_fds()
        leave_room_for(room)
        if room < 20:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            with pytest.raises(StoreError, match=f"RLIMIT_NOFILE is {limit}. Raise it"):
                actions[action]()
            assert len(store.entries()) == 2  # the index needs no room
        else:
            actions[action]()
        lift_limit()
        assert open_fds() == before

    run_child(act)
    if room < 20:
        check(store, "a")
        check(store, "b")
        assert len(messages(store)) == 1


def test_as_many_descriptors_as_the_kernel_takes(store: Store) -> None:
    publish_fds(store, "a", MOST_FDS - 3)
    publish(store, "b", count=3)
    publish_fds(store, "a", MOST_FDS - 3)  # the old and the new message at once
    check(store, "b")


@pytest.mark.parametrize("others", [0, 1, 100])
def test_more_descriptors_than_the_kernel_takes(store: Store, others: int) -> None:
    publish(store, "a", count=others)
    with pytest.raises(StoreError, match="at most 253 descriptors for a device, and 254 are needed"):
        publish_fds(store, "b", MOST_FDS + 1 - others)
    assert store.entries() == [check(store, "a")]
    assert len(messages(store)) == 1


def longest_name(store: Store) -> str:
    """A name with which the index has as many bytes as it may have."""
    store.publish(Entry("", "a", 1, ()), [])
    return "n" * (store._max_bytes - store._front_bytes())


def test_an_index_that_is_too_long(store: Store) -> None:
    name = longest_name(store)
    publish(store, "b")
    with pytest.raises(StoreError, match=r"index of the shared objects has \d+ bytes, and \d+ fit"):
        store.publish(Entry(name, "a", 1, ()), [0])
    check(store, "b")
    assert len(messages(store)) == 1


def test_the_longest_index_can_be_replaced_by_as_long_a_one(store: Store) -> None:
    name = longest_name(store)
    assert len(name) > 50_000
    for generation in range(3):
        store.publish(Entry(name, "a", generation, ()), [])
    assert store._front_bytes() == store._max_bytes
    store.update(lambda old: dataclasses.replace(old, generation=9))
    assert store.entries() == [Entry(name, "a", 9, ())]
    with pytest.raises(StoreError, match="bytes"):
        store.publish(Entry(name + "n", "a", 1, ()), [])


@pytest.mark.parametrize("length", range(1, 106_000, 3001))
def test_an_index_of_any_length_can_be_replaced(store: Store, length: int) -> None:
    for _ in range(3):
        store.publish(Entry("n" * length, "a", 1, ()), [])
    assert len(messages(store)) == 1


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        pytest.param("n" * 50_000, "", "Resource temporarily unavailable", id="full"),
        pytest.param("", "n" * 50_000, "Message too long", id="too long"),
    ],
)
def test_a_socket_buffer_that_is_too_small(store: Store, first: str, second: str, reason: str) -> None:
    store.publish(Entry(first, "a", 1, ()), [])
    store._sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with pytest.raises(StoreError, match=rf"does not fit .*\({reason}\).* net.core.wmem_max"):
        store.publish(Entry(second, "a", 2, ()), [0])
    assert store.entries() == [Entry(first, "a", 1, ())]
    assert len(messages(store)) == 1


def test_more_descriptors_parked_than_the_user_may() -> None:
    stores = [Store() for _ in range(20)]

    def fill() -> None:
        if os.getuid() == 0:  # root is exempt
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        leave_room_for(80)
        before = open_fds()
        used = iter(stores)
        with pytest.raises(StoreError, match=r"more descriptors parked .* RLIMIT_NOFILE allows, which is \d+. Raise"):
            deque((publish_fds(store, "a", 60) for store in used), maxlen=0)
        assert open_fds() == before
        refused = stores[-len(list(used)) - 1]
        assert refused.entries() == []
        lift_limit()
        publish_fds(refused, "a", 60)

    run_child(fill)
    for store in stores:
        store.close()


def test_other_errors_pass(store: Store) -> None:
    store.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        store.find("a")
