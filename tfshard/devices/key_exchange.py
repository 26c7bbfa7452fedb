"""Diffie-Hellman key exchange: two ends of a connection agree on a key that a listener does not learn.

The group is ffdhe3072 of RFC 7919, a safe prime. The numbers of each exchange are new. Nothing proves who the other end
is: see docs/security.md, "Without a secret".
"""

import hashlib
import hmac
import secrets

from tfshard.errors import ShardingError

PUBLIC_BYTES = 384
_PRIVATE_BITS = 512
_GENERATOR = 2
PRIME = int(
    "FFFFFFFFFFFFFFFFADF85458A2BB4A9AAFDC5620273D3CF1D8B9C583CE2D3695A9E13641146433FBCC939DCE249B3EF97D2FE363630C75D8"
    "F681B202AEC4617AD3DF1ED5D5FD65612433F51F5F066ED0856365553DED1AF3B557135E7F57C935984F0C70E0E68B77E2A689DAF3EFE872"
    "1DF158A136ADE73530ACCA4F483A797ABC0AB182B324FB61D108A94BB2C8E3FBB96ADAB760D7F4681D4F42A3DE394DF4AE56EDE76372BB19"
    "0B07A7C8EE0A6D709E02FCE1CDF7E2ECC03404CD28342F619172FE9CE98583FF8E4F1232EEF28183C3FE3B1B4C6FAD733BB5FCBC2EC22005"
    "C58EF1837D1683B2C6F34A26C1B2EFFA886B4238611FCFDCDE355B3B6519035BBC34F4DEF99C023861B46FC9D6E6C9077AD91D2691F7F7EE"
    "598CB0FAC186D91CAEFE130985139270B4130C93BC437944F4FD4452E2D74DD364F2E21E71F54BFF5CAE82AB9C9DF69EE86D2BC522363A0D"
    "ABC521979B0DEADA1DBF9A42D5C4484E0ABCD06BFA53DDEF3C1B20EE3FD59D7C25E41D2B66C62E37FFFFFFFFFFFFFFFF",
    16,
)


class BadPublicValueError(ShardingError):
    """The other end sent a number with which the key would not be secret."""


class KeyExchange:
    """One end of an exchange.

    Attributes:
        public: The value to send to the other end.

    >>> first, second = KeyExchange(), KeyExchange()
    >>> first.key(second.public, b"nonces") == second.key(first.public, b"nonces")
    True
    """

    def __init__(self) -> None:
        self._private = secrets.randbits(_PRIVATE_BITS) | 1 << _PRIVATE_BITS
        self.public = pow(_GENERATOR, self._private, PRIME).to_bytes(PUBLIC_BYTES, "big")

    def key(self, theirs: bytes, salt: bytes) -> bytes:
        """Return the key that both ends share, 32 bytes (HKDF's extraction with HMAC-SHA256).

        Args:
            theirs: The other end's public value.
            salt: Bytes that are equal at both ends and new for each exchange.

        Raises:
            BadPublicValueError: The value is outside of 2 to PRIME - 2.
        """
        value = int.from_bytes(theirs, "big")
        # A safe prime has no small subgroups but these two.
        if not 2 <= value <= PRIME - 2:
            raise BadPublicValueError("The other end sent a wrong public value.")
        shared = pow(value, self._private, PRIME).to_bytes(PUBLIC_BYTES, "big")
        # In one order at both ends.
        return hmac.digest(salt, shared + b"".join(sorted((self.public, theirs))), hashlib.sha256)
