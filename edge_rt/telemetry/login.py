"""How the daemon proves itself to the broker, and the broker to it."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from edge_rt.errors import ConfigError, MissingLibraryError
from edge_rt.telemetry.settings import MqttSettings

logger = logging.getLogger(__name__)

CREDENTIAL = "mqtt-password"
_MOST_PASSWORD_BYTES = 65_535


@dataclass(frozen=True, slots=True)
class Login:
    """Read anew for each connection, so that what was renewed or corrected counts at once."""

    username: str | None
    password: str | None = field(repr=False)
    tls: ssl.SSLContext | None


def check(settings: MqttSettings) -> None:
    """ConfigError for files that cannot work now, so that a typo shows when the daemon starts."""
    if importlib.util.find_spec("paho") is None:
        raise MissingLibraryError("paho-mqtt", "serve")
    login = read_login(settings)
    if login.password is not None and login.tls is None and not _is_loopback(settings.host or ""):
        logger.warning(
            "the password for %s crosses the network unencrypted; set tls = true in [mqtt]",
            settings.host,
        )


def read_login(settings: MqttSettings) -> Login:
    """What the settings' files hold; ConfigError names the file and its fault."""
    password = _password(settings) if settings.username is not None else None
    return Login(settings.username, password, _context(settings) if settings.tls else None)


def _password(settings: MqttSettings) -> str | None:
    if settings.password_file is not None:
        path = Path(settings.password_file)
    elif directory := os.environ.get("CREDENTIALS_DIRECTORY"):
        path = Path(directory) / CREDENTIAL
        if not path.exists():
            return None
    else:
        return None
    try:
        mode, content = path.stat().st_mode, path.read_bytes()
        password = content.decode().removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise ConfigError(f"password_file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"password_file {path} is not UTF-8 text") from error
    if mode & 0o007:
        raise ConfigError(f"{path} can be read by everybody; chmod o-rwx {path}")
    if not 1 <= len(password.encode()) <= _MOST_PASSWORD_BYTES:
        raise ConfigError(
            f"password_file {path} must hold 1 to {_MOST_PASSWORD_BYTES} bytes, "
            f"found {len(password.encode())}"
        )
    return password


def _context(settings: MqttSettings) -> ssl.SSLContext:
    for name in ("ca_file", "cert_file", "key_file"):
        path = getattr(settings, name)
        if path is not None:
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(f"{name} {path}: {error.strerror}") from error
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
    except ssl.SSLError as error:
        raise ConfigError(f"ca_file {settings.ca_file} holds no certificate in PEM form") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.sslsocket_class = _Socket
    if settings.cert_file is not None:
        try:
            # A password at hand keeps OpenSSL from asking the terminal for an encrypted key's.
            context.load_cert_chain(settings.cert_file, settings.key_file, password="")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"cert_file {settings.cert_file} and key_file {settings.key_file} cannot be used "
                f"({_reason(error)}): both must be PEM and belong together, the key not encrypted"
            ) from error
    return context


class _Socket(ssl.SSLSocket):
    """Closed if the handshake fails, as paho forgets it then."""

    def do_handshake(self, block: bool = False) -> None:
        """As its base has it."""
        try:
            super().do_handshake(block)
        except BaseException:
            self.close()
            raise


def _reason(error: ssl.SSLError | ValueError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else str(error)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
