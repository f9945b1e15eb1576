"""Key files, signatures and seals."""

from __future__ import annotations

import base64
import json
import os
import stat
import threading
from dataclasses import replace

import pytest

from tenure.ledger.errors import ConfigurationError, PermissionDenied
from tenure.tasks import keys
from tenure.tasks.keys import Capability, Keyring, Principal

KEY = base64.b64encode(b"k" * 32).decode()
ENTRY = {"key": KEY, "capabilities": ["register", "adopt", "attach"]}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.json"


def write(path, text, mode=0o600):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def document(**entry):
    return json.dumps({"principals": {"default": ENTRY | entry}})


def test_a_made_file_is_its_owners_alone_and_can_be_loaded(path):
    assert keys.create(path, "default")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    principal = Keyring.load(path).get("default")
    assert (principal.name, principal.capabilities) == ("default", frozenset(Capability))


def test_folders_are_made_for_their_owner_alone(tmp_path):
    path = tmp_path / "state" / "keys.json"
    assert keys.create(path, "default")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_an_umask_does_not_open_a_made_file(path):
    before = os.umask(0)
    try:
        keys.create(path, "default")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_there_is_kept(path):
    keys.create(path, "default")
    before = path.read_bytes()
    assert not keys.create(path, "another")
    assert path.read_bytes() == before


def test_each_made_key_is_new(tmp_path):
    signatures = set()
    for number in range(3):
        keys.create(tmp_path / str(number), "default")
        signatures.add(Keyring.load(tmp_path / str(number)).get("default").sign("text"))
    assert len(signatures) == 3


def test_of_many_makers_at_once_one_wins_and_every_reader_sees_its_key(path):
    start, made, seen = threading.Barrier(8), [], []

    def make():
        start.wait()
        made.append(keys.create(path, "default"))
        seen.append(Keyring.load(path).get("default").sign("text"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sorted(made), len(set(seen))) == ([False] * 7 + [True], 1)
    assert [file.name for file in path.parent.iterdir()] == ["keys.json"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    write(tmp_path / "file", "")
    with pytest.raises(ConfigurationError) as refused:
        keys.create(tmp_path / "file" / "keys.json", "default")
    assert "file/keys.json" in refused.value.detail


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o602, 0o666])
def test_a_file_that_others_can_touch_is_refused(path, mode):
    with pytest.raises(ConfigurationError) as refused:
        Keyring.load(write(path, document(), mode))
    assert "chmod 600" in refused.value.detail


def test_a_missing_file_names_what_makes_one(path):
    with pytest.raises(ConfigurationError) as refused:
        Keyring.load(path)
    assert str(path) in refused.value.detail
    assert "tenure keys" in refused.value.detail


def test_a_folder_in_its_place_is_refused(path):
    path.mkdir()
    with pytest.raises(ConfigurationError):
        Keyring.load(path)


MALFORMED = {
    "no JSON": "{",
    "not UTF-8": b"\xff\xfe\xfa",
    "a list": "[]",
    "no principals": "{}",
    "a list of principals": '{"principals": []}',
    "an entry that is text": '{"principals": {"default": "x"}}',
    "no key": '{"principals": {"default": {"capabilities": []}}}',
    "no capabilities": json.dumps({"principals": {"default": {"key": KEY}}}),
    "a key that is a number": document(key=7),
    "a key that is not base64": document(key="?" * 44),
    "an unknown capability": document(capabilities=["own"]),
    "a capability that is not text": document(capabilities=[7]),
    "capabilities that are text": document(capabilities="register"),
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_refused_and_never_shown(path, text):
    with pytest.raises(ConfigurationError) as refused:
        Keyring.load(write(path, text))
    assert str(path) in refused.value.detail
    assert KEY not in refused.value.detail


def test_a_short_key_is_refused(path):
    for size, allowed in ((0, False), (16, False), (31, False), (32, True), (64, True)):
        write(path, document(key=base64.b64encode(b"k" * size).decode()))
        if allowed:
            assert Keyring.load(path).get("default")
            continue
        with pytest.raises(ConfigurationError) as refused:
            Keyring.load(path)
        assert f"{size} bytes" in refused.value.detail


def test_a_principal_has_the_capabilities_of_its_entry_and_no_other(path):
    principal = Keyring.load(write(path, document(capabilities=["adopt"]))).get("default")
    principal.require(Capability.ADOPT)
    for capability in (Capability.REGISTER, Capability.ATTACH):
        with pytest.raises(PermissionDenied) as refused:
            principal.require(capability)
        assert refused.value.detail == f"capability_{capability}"


def test_an_unknown_principal_is_refused(path):
    ring = Keyring.load(write(path, document()))
    for name in ("other", "", "DEFAULT"):
        with pytest.raises(PermissionDenied) as refused:
            ring.get(name)
        assert refused.value.detail == "unknown_principal"


ONE = Principal.of("one", b"1" * 32)
TWO = Principal.of("two", b"2" * 32)


def test_a_signature_is_of_one_text_by_one_key():
    signature = ONE.sign("text")
    ONE.verify("text", signature)
    for principal, text, given in (
        (ONE, "texT", signature),
        (TWO, "text", signature),
        (ONE, "text", signature[:-1]),
        (ONE, "text", ""),
        (ONE, "text", "é"),
    ):
        with pytest.raises(PermissionDenied) as refused:
            principal.verify(text, given)
        assert refused.value.detail == "bad_signature"


def test_a_seal_opens_with_its_key_in_its_context():
    token = ONE.seal("the text", context="execution-1")
    assert ONE.unseal(token, context="execution-1") == "the text"
    changed = token[:20] + ("A" if token[20] != "A" else "B") + token[21:]
    for principal, given, context in (
        (TWO, token, "execution-1"),
        (ONE, token, "execution-2"),
        (ONE, changed, "execution-1"),
        (ONE, token[:-4], "execution-1"),
        (ONE, "", "execution-1"),
        (ONE, "not base64, é", "execution-1"),
        (ONE, "\ud800", "execution-1"),
        (ONE, token, "\ud800"),
    ):
        with pytest.raises(PermissionDenied) as refused:
            principal.unseal(given, context=context)
        assert refused.value.detail == "bad_seal"


def test_a_seal_says_nothing_and_is_new_each_time():
    tokens = {ONE.seal("the text", context="c") for _ in range(3)}
    assert len(tokens) == 3
    assert not any("the text" in token or b"the text" in base64.urlsafe_b64decode(token) for token in tokens)


def test_the_key_that_signs_cannot_seal():
    assert ONE.signing_key != ONE.sealing_key
    swapped = replace(ONE, signing_key=ONE.sealing_key, sealing_key=ONE.signing_key)
    with pytest.raises(PermissionDenied):
        swapped.unseal(ONE.seal("text", context="c"), context="c")


def test_keys_are_not_shown():
    shown = repr(ONE)
    assert "one" in shown
    for key in (ONE.signing_key, ONE.sealing_key):
        assert repr(key) not in shown
