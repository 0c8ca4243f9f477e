"""A Sigstore instance of the tests: a certificate authority and both logs, with keys of their own.

The formats are those of https://docs.sigstore.dev/about/bundle and of RFC 6962.
"""

import base64
import datetime
import hashlib
import json

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

_TIMESTAMPS = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
_ISSUER = ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_LOG = "log.tests.example"
_DAY = datetime.timedelta(days=1)
_DER = serialization.Encoding.DER


def _encode(data):
    return base64.b64encode(data).decode()


def _new_key():
    return ec.generate_private_key(ec.SECP256R1())


def _spki(key):
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(_DER, form)


def _key_id(key):
    return hashlib.sha256(_spki(key)).digest()


def _sign(key, data):
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


def _sized(data, width):
    return len(data).to_bytes(width) + data


class SigstoreInstance:
    """Signs statements; `trusted_root` is what its users trust."""

    def __init__(self):
        self._authority, self._certificates, self._log = _new_key(), _new_key(), _new_key()
        self._now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        basic = x509.BasicConstraints(ca=True, path_length=0)
        root = self._builder(self._name, self._authority).add_extension(basic, critical=True)
        root = root.add_extension(_usage("key_cert_sign"), critical=True)
        self._root = root.sign(self._authority, hashes.SHA256())

    @property
    def trusted_root(self):
        """The trusted root, as JSON."""
        start = {"start": (self._now - 30 * _DAY).isoformat()}
        certificate = {"rawBytes": _encode(self._root.public_bytes(_DER))}
        authority = {
            "subject": {"organization": "tests", "commonName": "tests"},
            "uri": "https://authority.tests.example",
            "certChain": {"certificates": [certificate]},
            "validFor": start,
        }
        root = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "certificateAuthorities": [authority],
            "tlogs": [_log_entry(self._log, start)],
            "ctlogs": [_log_entry(self._certificates, start)],
        }
        return json.dumps(root)

    def sign(self, data, identity, issuer):
        """Return a bundle of a signature of the data by an identity, as JSON."""
        key = _new_key()
        certificate = self._certificate(key, identity, issuer)
        signature, digest = _sign(key, data), hashlib.sha256(data)
        material = {
            "certificate": {"rawBytes": _encode(certificate.public_bytes(_DER))},
            "tlogEntries": [self._entry(certificate, signature, digest.hexdigest())],
        }
        message = {
            "messageDigest": {"algorithm": "SHA2_256", "digest": _encode(digest.digest())},
            "signature": _encode(signature),
        }
        bundle = {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": material,
            "messageSignature": message,
        }
        return json.dumps(bundle)

    def _builder(self, name, key):
        builder = x509.CertificateBuilder(issuer_name=self._name, subject_name=name)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(self._now - _DAY).not_valid_after(self._now + _DAY)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        return builder.add_extension(identifier, critical=False)

    def _certificate(self, key, identity, issuer):
        """Return a certificate with the timestamp that the log of certificates signed."""
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._authority.public_key())
        builder = self._builder(x509.Name([]), key)
        for extension, critical in [
            (_usage("digital_signature"), True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), False),
            (authority, False),
            (x509.SubjectAlternativeName([x509.RFC822Name(identity)]), True),
            (x509.UnrecognizedExtension(_ISSUER, issuer.encode()), False),
        ]:
            builder = builder.add_extension(extension, critical)
        body = builder.sign(self._authority, hashes.SHA256()).tbs_certificate_bytes
        time = (int(self._now.timestamp()) * 1000).to_bytes(8)
        entry = b"\0\1" + _key_id(self._authority) + _sized(body, 3)
        signature = _sign(self._certificates, b"\0\0" + time + entry + b"\0\0")
        stamp = (
            b"\0" + _key_id(self._certificates) + time + b"\0\0" + b"\4\3" + _sized(signature, 2)
        )
        stamps = _sized(_sized(stamp, 2), 2)
        octets = b"\4" + _sized(stamps, 1)  # at most 123 bytes
        builder = builder.add_extension(x509.UnrecognizedExtension(_TIMESTAMPS, octets), False)
        return builder.sign(self._authority, hashes.SHA256())

    def _entry(self, certificate, signature, digest):
        """Return the entry of the log of signatures, which has no other."""
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        record = {
            "apiVersion": "0.0.1",
            "kind": "hashedrekord",
            "spec": {
                "data": {"hash": {"algorithm": "sha256", "value": digest}},
                "signature": {
                    "content": _encode(signature),
                    "publicKey": {"content": _encode(pem)},
                },
            },
        }
        body = _canonical(record)
        leaf = hashlib.sha256(b"\0" + body).digest()
        note = f"{_LOG}\n1\n{_encode(leaf)}\n"
        identifier = _key_id(self._log)
        signed = _encode(identifier[:4] + _sign(self._log, note.encode()))
        time = int(self._now.timestamp())
        promised = {
            "body": _encode(body),
            "integratedTime": time,
            "logID": identifier.hex(),
            "logIndex": 0,
        }
        promise = _encode(_sign(self._log, _canonical(promised)))
        return {
            "logIndex": "0",
            "logId": {"keyId": _encode(identifier)},
            "kindVersion": {"kind": "hashedrekord", "version": "0.0.1"},
            "integratedTime": str(time),
            "inclusionPromise": {"signedEntryTimestamp": promise},
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": _encode(leaf),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": f"{note}\n\N{EM DASH} {_LOG} {signed}\n"},
            },
            "canonicalizedBody": _encode(body),
        }


_USAGES = [
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
]


def _usage(name):
    return x509.KeyUsage(**(dict.fromkeys(_USAGES, False) | {name: True}))


def _log_entry(key, start):
    return {
        "baseUrl": f"https://{_LOG}",
        "hashAlgorithm": "SHA2_256",
        "publicKey": {
            "rawBytes": _encode(_spki(key)),
            "keyDetails": "PKIX_ECDSA_P256_SHA_256",
            "validFor": start,
        },
        "logId": {"keyId": _encode(_key_id(key))},
    }


def _canonical(value):
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
