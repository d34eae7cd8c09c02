"""Wire format of a control connection: a mutual proof of the secret, then authenticated frames.

Nothing is encrypted. A process that does not know the secret can neither send a valid frame nor impersonate a rank, and
cannot change, repeat, drop or reorder a frame without ending the connection.

1. The client sends its hello: a fixed word and 32 random bytes, its nonce.
2. The server sends its hello, and its proof: an HMAC-SHA256 over both nonces with the secret as key.
3. The client sends its own proof, over its rank too, and its rank. If the server's proof was wrong, it sends zeros
   instead of its proof, so that the server can name the rank. Both derive one key for each direction, and every later
   byte is in a frame.

A frame is its length (4 bytes), a keyed BLAKE2 hash over its number and its content (16 bytes), and the
content. The receiver verifies the hash before it parses the content.
"""

from __future__ import annotations

import hmac
import os
import struct
from hashlib import blake2b

__all__ = ["HELLO_BYTES", "MAX_FRAME_BYTES", "PROOF_BYTES", "RANK_BYTES", "Channel", "Hello", "InvalidFrameError"]

MAX_FRAME_BYTES = 64 << 20
PROOF_BYTES = 32

_WORD = b"unisono2"
_NONCE_BYTES = 32
HELLO_BYTES = len(_WORD) + _NONCE_BYTES

_RANK = struct.Struct("<q")
_NO_RANK = -1
_NO_PROOF = bytes(PROOF_BYTES)
RANK_BYTES = _RANK.size

_HEAD = struct.Struct("<I16s")
_NUMBER = struct.Struct("<Q")


class InvalidFrameError(ValueError):
    """Bytes that the peer did not encode, or not at this position in the stream."""


class Channel:
    """Encoder of outgoing and verifier of incoming frames, in order."""

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send_key, self._receive_key = send_key, receive_key
        self._encoded = self._decoded = 0
        self._arrived = bytearray()

    def encode(self, content: bytes) -> bytes:
        """Return the frame to send next."""
        if len(content) > MAX_FRAME_BYTES:
            raise ValueError(
                f"{len(content)} bytes are too many for one message; at most {MAX_FRAME_BYTES} are allowed"
            )
        mac = _mac(self._send_key, self._encoded, content)
        self._encoded += 1
        return _HEAD.pack(len(content), mac) + content

    def decode(self, data: bytes) -> list[bytes]:
        """Return the contents of the frames that these bytes complete."""
        self._arrived += data
        contents = []
        while len(self._arrived) >= _HEAD.size:
            length, mac = _HEAD.unpack_from(self._arrived)
            if length > MAX_FRAME_BYTES:
                raise InvalidFrameError("a frame is too long")
            end = _HEAD.size + length
            if len(self._arrived) < end:
                break
            content = bytes(memoryview(self._arrived)[_HEAD.size : end])
            if not hmac.compare_digest(mac, _mac(self._receive_key, self._decoded, content)):
                raise InvalidFrameError("a frame is not authentic")
            self._decoded += 1
            del self._arrived[:end]
            contents.append(content)
        return contents


def _mac(key: bytes, number: int, content: bytes) -> bytes:
    mac = blake2b(_NUMBER.pack(number), key=key, digest_size=16)
    mac.update(content)
    return mac.digest()


class Hello:
    """One side's part in the proof that both know the secret.

    Args:
        secret: The secret that both sides should know.
        client: Whether this side connects.
        rank: Rank of the client, if it has one.

    Attributes:
        hello: The bytes to send first.
        rank: The client's rank, proved or only claimed; see `accepts`.
    """

    def __init__(self, secret: bytes, *, client: bool, rank: int | None = None) -> None:
        self._secret, self._client, self.rank = secret, client, rank
        self._nonce, self._theirs = os.urandom(_NONCE_BYTES), b""
        self.hello = _WORD + self._nonce

    def meet(self, hello: bytes) -> bool:
        """Record the peer's hello. Return False if it belongs to another protocol."""
        self._theirs = hello[len(_WORD) :]
        return len(hello) == HELLO_BYTES and hello.startswith(_WORD)

    def proof(self) -> bytes:
        """Return the bytes that prove to the peer that this side knows the secret."""
        if not self._client:
            return self._derive(b"server")
        return self._derive(b"client", self._rank_bytes()) + self._rank_bytes()

    def claim(self) -> bytes:
        """Return the bytes with this client's rank, sent if the server has another secret. They prove nothing."""
        return _NO_PROOF + self._rank_bytes()

    def accepts(self, proof: bytes) -> bool:
        """Return whether the peer knows the secret."""
        if self._client:
            return hmac.compare_digest(proof, self._derive(b"server"))
        proof, rank = proof[:PROOF_BYTES], proof[PROOF_BYTES:]
        accepted = hmac.compare_digest(proof, self._derive(b"client", rank))
        (number,) = _RANK.unpack(rank)
        if number >= 0 and (accepted or proof == _NO_PROOF):
            self.rank = number
        return accepted

    def channel(self) -> Channel:
        """Make the channel for everything that follows."""
        keys = self._derive(b"client's frames"), self._derive(b"server's frames")
        return Channel(*keys) if self._client else Channel(*reversed(keys))

    def _rank_bytes(self) -> bytes:
        return _RANK.pack(_NO_RANK if self.rank is None else self.rank)

    def _derive(self, purpose: bytes, more: bytes = b"") -> bytes:
        nonces = (self._nonce, self._theirs) if self._client else (self._theirs, self._nonce)
        return hmac.digest(self._secret, b"unisono " + purpose + b"\0" + b"".join(nonces) + more, "sha256")
