"""Certificate authority, the SuperLink's certificate, and SuperNodes' key pairs."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fl_privacy.errors import UserError
from fl_privacy.files import write_private, write_whole

CA_DAYS, SERVER_DAYS = 3650, 825
"""Days for which certificates are valid; some clients refuse server certificates with more."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Additional host names in the SuperLink's certificate, for trials on its own machine."""

_RENEW = "remove certificate and key, and run `fl-privacy deploy` again"
_EARLIER = datetime.timedelta(hours=1)  # tolerated difference of clocks


def make_authority(certificate: Path, key: Path) -> None:
    """Write certificate and key of a new certificate authority (P-384), which can sign server certificates only."""
    made = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fl-privacy deployment")])
    builder = _builder(name, name, made.public_key(), CA_DAYS, signs=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(made.public_key()), critical=False)
    _write(certificate, key, made, builder.sign(made, hashes.SHA384()))


def make_server_certificate(certificate: Path, key: Path, *, host: str, authority: tuple[Path, Path]) -> None:
    """Write a server certificate for ``host`` and loopback, signed by ``authority`` (certificate, key), and its key."""
    issuer, signer = read_certificate(authority[0]), read_private_key(authority[1])
    made = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    names = [_general_name(text) for text in dict.fromkeys([host, *LOOPBACK])]
    builder = _builder(name, issuer.subject, made.public_key(), SERVER_DAYS, signs=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(identifier, critical=False)
    _write(certificate, key, made, builder.sign(signer, hashes.SHA384()))


def make_node_key(private: Path, public: Path) -> None:
    """Write a new key pair of a SuperNode (P-384), in Flower's formats."""
    made = ec.generate_private_key(ec.SECP384R1())
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    write_private(private, made.private_bytes(*encoding))
    shown = made.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_whole(public, shown + b"\n")


def expect_valid(certificate: Path, authority: Path, host: str) -> datetime.datetime:
    """Return the time at which a certificate expires; ``UserError`` if signer, time or ``host`` is wrong."""
    held, signer = read_certificate(certificate), read_certificate(authority)
    try:
        held.verify_directly_issued_by(signer)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise UserError(f"{certificate} is expected to be signed by {authority}, but is not; {_RENEW}.") from error
    if not held.not_valid_before_utc <= datetime.datetime.now(datetime.UTC) <= held.not_valid_after_utc:
        end = f"{held.not_valid_after_utc:%Y-%m-%d}"
        raise UserError(f"{certificate} is expected to be valid now, but ends on {end}; {_RENEW}.")
    names = held.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if _general_name(host) not in list(names):
        held_by = ", ".join(str(name.value) for name in names)
        raise UserError(f"{certificate} is expected to be for {host}, but is for {held_by}; {_RENEW}.")
    return held.not_valid_after_utc


def read_certificate(path: Path) -> x509.Certificate:
    """Return the certificate in the file ``path``; ``UserError`` if it can't be read."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is expected to be a certificate, but can't be read: {error}; {_RENEW}.") from error


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the elliptic-curve key in the file ``path``; ``UserError`` if there is none."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is expected to be a private key, but can't be read: {error}; {_RENEW}.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path} is expected to be an elliptic-curve key, but is a {type(key).__name__}; {_RENEW}.")
    return key


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int, *, signs: bool
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - _EARLIER)
    builder = builder.not_valid_after(now + datetime.timedelta(days=days))
    constraints = x509.BasicConstraints(ca=signs, path_length=0 if signs else None)
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    never = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    usage = x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **never)
    return builder.add_extension(constraints, critical=True).add_extension(usage, critical=True)


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _write(certificate: Path, key: Path, made: ec.EllipticCurvePrivateKey, signed: x509.Certificate) -> None:
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    write_private(key, made.private_bytes(*encoding))
    write_whole(certificate, signed.public_bytes(serialization.Encoding.PEM))
