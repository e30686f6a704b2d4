"""Certificates of a job, made with openssl."""

import subprocess

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


def authority(folder, name):
    """Key and certificate of an authority."""
    key = folder / f"{name}.key"
    certificate = folder / f"{name}.pem"
    openssl(
        "req",
        "-x509",
        *NEW_KEY,
        "-keyout",
        key,
        "-out",
        certificate,
        "-days",
        2,
        "-subj",
        f"/CN={name}",
    )
    return key, certificate


def signed(folder, name, by):
    """Files for ``options.tls``: a certificate signed by ``by``, its key, and that of ``by``."""
    key = folder / f"{name}.key"
    request = folder / f"{name}.csr"
    certificate = folder / f"{name}.pem"
    openssl("req", *NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
    openssl(
        "x509",
        "-req",
        "-in",
        request,
        "-CA",
        by[1],
        "-CAkey",
        by[0],
        "-CAcreateserial",
        "-out",
        certificate,
        "-days",
        2,
    )
    return str(certificate), str(key), str(by[1])
