"""WebAssembly modules of the tests, as WAT."""

from __future__ import annotations

import base64

import wasmtime

ALLOC = """
  (global $next (mut i32) (i32.const 1024))
  (func (export "alloc") (param $bytes i32) (result i32) (local $address i32)
    (local.set $address (global.get $next))
    (global.set $next (i32.and
      (i32.add (i32.add (global.get $next) (local.get $bytes)) (i32.const 7)) (i32.const -8)))
    (if (i32.gt_u (global.get $next) (i32.mul (memory.size) (i32.const 65536)))
      (then (drop (memory.grow (i32.const 16)))))
    (local.get $address))
"""
PROCESS = (
    '(func (export "process") (param $logits i32) (param $vocab i32) (param $tokens i32)'
    " (param $prompt i32) (param $count i32) (param $state i32)"
)
MEMORY = '(memory (export "memory") 1)'


def module(process: str, more: str = "", memory: str = MEMORY, alloc: str = ALLOC) -> bytes:
    """Return a module with a body of `process`."""
    return bytes(wasmtime.wat2wasm(f"(module {memory} {alloc} {more} {PROCESS} {process}))"))


def text(binary: bytes) -> str:
    """Return a module as base64."""
    return base64.b64encode(binary).decode()


SUCCESSOR = module(
    """
    (local $i i32) (local $wanted i32) (local $at i32)
    (local.set $wanted (i32.add (i32.const 1) (i32.load (i32.add (local.get $tokens)
      (i32.mul (i32.const 4) (i32.sub (local.get $count) (i32.const 1)))))))
    (if (i32.ge_u (local.get $wanted) (i32.const 97)) (then (local.set $wanted (i32.const 65))))
    (local.set $at (i32.add (local.get $logits) (i32.mul (i32.const 4) (local.get $wanted))))
    (f32.store (local.get $at) (f32.add (f32.load (local.get $at)) (f32.const 1000)))
    """
)
"""Prefers the token after the last one, from 65 to 96."""

ALTERNATING = module(
    """
    (local $at i32)
    (local.set $at (i32.add (local.get $logits) (i32.mul (i32.const 4)
      (i32.add (i32.const 65) (i32.rem_u (local.get $count) (i32.const 3))))))
    (f32.store (local.get $at) (f32.add (f32.load (local.get $at)) (f32.const 1000)))
    """
)
"""Prefers one of three tokens, in turns, so that drafts of `ngram` are accepted."""

VOWELS = module(
    """
    (local $token i32)
    (loop $next
      (if (i32.eqz (i32.or (i32.or
          (i32.eq (local.get $token) (i32.load (i32.const 16)))
          (i32.eq (local.get $token) (i32.load (i32.const 20))))
          (i32.eq (local.get $token) (i32.load (i32.const 24)))))
        (then (f32.store (local.get $logits) (f32.const -inf))))
      (local.set $logits (i32.add (local.get $logits) (i32.const 4)))
      (local.set $token (i32.add (local.get $token) (i32.const 1)))
      (br_if $next (i32.lt_u (local.get $token) (local.get $vocab))))
    """,
    r'(data (i32.const 16) "\41\00\00\00\45\00\00\00\49\00\00\00")',
)
"""Allows the tokens 65, 69 and 73 only, as a grammar."""

COUNTING = module(
    """
    (local $at i32)
    (local.set $at (i32.add (local.get $logits) (i32.mul (i32.const 4)
      (i32.rem_u (i32.load (local.get $state)) (i32.const 100)))))
    (f32.store (local.get $at) (f32.add (f32.load (local.get $at)) (f32.const 1000)))
    """,
    """
    (global (export "state_size") i32 (i32.const 4))
    (func (export "advance") (param $state i32) (param $tokens i32) (param $count i32)
      (local $i i32)
      (loop $next
        (i32.store (local.get $state) (i32.add (i32.load (local.get $state))
          (i32.add (i32.const 1) (i32.rem_u (i32.load (i32.add (local.get $tokens)
            (i32.mul (local.get $i) (i32.const 4)))) (i32.const 7)))))
        (local.set $i (i32.add (local.get $i) (i32.const 1)))
        (br_if $next (i32.lt_u (local.get $i) (local.get $count)))))
    """,
)
"""Prefers a token that depends on a sum over all tokens, in the state."""

FAILING = {
    "infinite loop": (module("(loop $l (br $l))"), "fuel"),
    "fill in a loop": (
        module("(loop $l (memory.fill (i32.const 0) (i32.const 1) (i32.const 65536)) (br $l))"),
        "fuel",
    ),
    "deep recursion": (module("(call $f)", "(func $f (call $f) (call $f))"), "stack"),
    "trap": (module("unreachable"), "trap"),
    "hidden growth": (
        module("(if (i32.eq (memory.grow (i32.const 60000)) (i32.const -1)) (then unreachable))"),
        "trap",
    ),
    "large memory": (module("", memory='(memory (export "memory") 60000)'), "memory"),
    "huge table": (module("", "(table 1000000 funcref)"), "memory"),
    "NaN logits": (module("(f32.store (local.get $logits) (f32.const nan))"), "logits"),
    "infinite logits": (module("(f32.store (local.get $logits) (f32.const inf))"), "logits"),
    "no token": (
        module(
            """(local $i i32) (loop $l
            (f32.store (local.get $logits) (f32.const -inf))
            (local.set $logits (i32.add (local.get $logits) (i32.const 4)))
            (local.set $i (i32.add (local.get $i) (i32.const 1)))
            (br_if $l (i32.lt_u (local.get $i) (local.get $vocab))))"""
        ),
        "logits",
    ),
    "address outside memory": (
        module("", alloc='(func (export "alloc") (param i32) (result i32) (i32.const 0x7ffffff0))'),
        "memory",
    ),
    "negative address": (
        module("", alloc='(func (export "alloc") (param i32) (result i32) (i32.const -8))'),
        "memory",
    ),
    "loop in alloc": (
        module(
            "",
            alloc='(func (export "alloc") (param i32) (result i32) (loop $l (br $l)) unreachable)',
        ),
        "fuel",
    ),
    "large state": (
        module("", '(global (export "state_size") i32 (i32.const 1000000))'),
        "state",
    ),
    "loop in advance": (
        module(
            "",
            '(global (export "state_size") i32 (i32.const 4))'
            '(func (export "advance") (param i32 i32 i32) (loop $l (br $l)))',
        ),
        "fuel",
    ),
}
"""Modules that fail when they run, with the reason."""

_FUNCTION = f"{MEMORY} {ALLOC}"
REJECTED = {
    "text": (b"(module)", "expected a binary WebAssembly module"),
    "empty": (b"", "expected a binary WebAssembly module"),
    "truncated": (SUCCESSOR[:-3], "."),
    "damaged": (SUCCESSOR[:60] + b"\xff" * 30 + SUCCESSOR[90:], "."),
    "component": (b"\0asm\x0d\0\1\0", "expected a binary WebAssembly module"),
    "imports": (
        module("", memory='(import "env" "f" (func)) ' + MEMORY),
        "expected no imports, got env.f",
    ),
    "WASI": (
        module(
            "",
            memory='(import "wasi_snapshot_preview1" "fd_write"'
            " (func (param i32 i32 i32 i32) (result i32))) " + MEMORY,
        ),
        "expected no imports, got wasi_snapshot_preview1.fd_write",
    ),
    "start function": (module("", "(func $s) (start $s)"), "expected no start function"),
    "no exports": (bytes(wasmtime.wat2wasm("(module)")), "exported memory named memory"),
    "wrong export": (
        bytes(wasmtime.wat2wasm(f'(module {_FUNCTION} (func (export "process") (param i32)))')),
        r"expected an exported function process\(i32, i32, i32, i32, i32, i32\)",
    ),
    "memory is a function": (
        module("", memory='(memory 1) (func (export "memory"))'),
        "exported memory named memory",
    ),
    "state of another type": (
        module("", '(global (export "state_size") i64 (i64.const 4))'),
        "constant i32 global",
    ),
    "advance without state": (
        module("", '(func (export "advance") (param i32 i32 i32))'),
        "expected an exported global state_size",
    ),
    "two memories": (
        bytes(wasmtime.wat2wasm(f"(module {_FUNCTION} (memory 1) {PROCESS}))")),
        ".",
    ),
}
"""Modules that are not compiled, with a pattern of the message."""


def compile_bomb(size: int) -> bytes:
    """Return a module of nested blocks, which takes long to compile for its size."""
    body = "".join(
        f"(if (local.get $vocab) (then (local.set {i % 100 + 6}"
        f" (i32.add (local.get {i % 97}) (local.get {i % 89})))))"
        for i in range(size)
    )
    return module(f"(local {'i32 ' * 100}) {body}")
