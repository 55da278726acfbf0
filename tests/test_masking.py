"""Secrets are masked wherever they hide, and hyperparameters are not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mprun.config import Config
from mprun.config_check import to_plain
from mprun.options import tree
from mprun.tracking.masking import MASK, masked, masked_words

ENVIRON = {"WANDB_API_KEY": "my-own-key-1234", "PWD": "/work/place", "HOME": "/home/me", "SHORT_TOKEN": "a"}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("storage", "sqlite://user:pw@host/db", "sqlite://***@host/db"),
        ("storage", "postgres://u:p@s/s@host:5/db", "postgres://***@host:5/db"),
        ("remote", "https://ghp_token@host/me/it.git", "https://***@host/me/it.git"),
        ("url", "https://host/x?token=abcdefghij&n=1", "https://host/x?token=***&n=1"),
        ("password", "x", MASK),
        ("password", 1234, MASK),
        ("db_passwd", "x", MASK),
        ("myApiKey", "x", MASK),
        ("aws-secret-access-key", "x", MASK),
        ("hf_token", "abcdefgh", MASK),
        ("note", "Authorization: Bearer abcdefgh12345", "Authorization: Bearer ***"),
        ("note", "password: hunter2, then", "password: ***, then"),
        ("note", "my-own-key-1234 it is", "*** it is"),
        ("note", "hf_" + "a" * 30, MASK),
        ("note", "ghp_" + "A1" * 18, MASK),
        ("note", "AKIA" + "A" * 16, MASK),
        ("note", "a1" * 20, MASK),  # as W&B's keys are
        ("note", "eyJhbGciOiJI.eyJzdWIiOiIx.abc", MASK),
        ("note", "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", MASK),
    ],
)
def test_a_secret_is_masked(key: str, value: Any, expected: Any) -> None:
    assert masked(value, ENVIRON, key=key) == expected
    assert masked({"a": [{key: value}]}, ENVIRON) == {"a": [{key: expected}]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("class_token", True), ("class_token", "cls"), ("max_tokens", 8), ("token", 3), ("password", None), ("password", ""),
        ("commit", "a1" * 20), ("data_sha256", "b" * 64), ("url", "https://host:80/a@b"), ("remote", "git@host:me/it"),
        ("root", "/work/place/data"), ("root", "/home/me/data"), ("name", "digits-vit-fp16_dynamic"), ("note", "a"),
        ("global_pool", "token"), ("api_key", "null"), ("secrets", 0.5), ("n", 7),
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(key: str, value: Any) -> None:
    assert masked(value, ENVIRON, key=key) == value


def test_words_of_a_command_line() -> None:
    words = [
        "train.steps=3",
        "+dataset.kwargs.password=abc",
        "dataset.kwargs={api_key:abc,n:3}",
        "x.url=mysql://a:b@c",
        "-m",
    ]
    assert masked_words(words, ENVIRON) == [
        "train.steps=3", "+dataset.kwargs.password=***", "dataset.kwargs={api_key:***,n:3}", "x.url=mysql://***@c", "-m",
    ]  # fmt: skip
    assert masked_words(["optimizer.betas=[0.9, 0.99]", "name='a=b'"], ENVIRON) == [
        "optimizer.betas=[0.9, 0.99]",
        "name='a=b'",
    ]


def test_no_key_of_ours_is_taken_for_a_secret() -> None:
    plain = to_plain(Config(name="n"))
    assert masked(plain, ENVIRON) == plain
    files = [path for name in ("conf", "recipes") for path in tree(name).rglob("*.yaml")]
    assert len(files) > 20
    for path in files:
        content = yaml.safe_load(path.read_text())
        assert masked(content, ENVIRON) == content, path


SECRET = st.text("abcdefXYZ0123456789!$%-_/@:", min_size=8, max_size=30)
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text("abc xyz", max_size=9)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("lmnop", max_size=5), inner, max_size=3)
    ),
    max_leaves=9,
)


def place(content: Any, path: list[int], key: str, value: str) -> Any:
    """``content`` with ``value`` under ``key`` somewhere in it."""
    if isinstance(content, dict) and content and path:
        name = sorted(content)[path[0] % len(content)]
        return {**content, name: place(content[name], path[1:], key, value)}
    if isinstance(content, list) and content and path:
        at = path[0] % len(content)
        return [*content[:at], place(content[at], path[1:], key, value), *content[at + 1 :]]
    return {key: value, "rest": content}


@given(
    PLAIN,
    st.lists(st.integers(0, 9), max_size=4),
    st.sampled_from(["password", "api_key", "hf_token", "SECRET"]),
    SECRET,
)
def test_no_depth_hides_a_secret(content: Any, path: list[int], key: str, secret: str) -> None:
    given_ = place(content, path, key, secret)
    found = masked(given_, {})
    assert secret not in json.dumps(found)
    assert found == place(content, path, key, MASK)


@given(PLAIN)
def test_what_holds_no_secret_is_equal_afterwards(content: Any) -> None:
    assert masked(content, ENVIRON) == content


@given(SECRET.filter(lambda text: not text.isspace()), st.text("abc =,", max_size=9), st.text("abc =,", max_size=9))
def test_a_secret_of_the_environment_is_found_in_any_text(secret: str, before: str, after: str) -> None:
    assert secret not in masked(before + secret + after, {"X_SECRET": secret})
