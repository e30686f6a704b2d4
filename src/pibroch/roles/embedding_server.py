"""Embedding servers: they hold the rows in place of the trainers."""

from pibroch.roles.role import Role

ROLE = Role(
    title="embedding server",
    worker="embedding",
    command="embedding-server",
    functions="pibroch.servers.server",
    block=0,
    folder="servers",
    serving="pibroch.servers:serve",
    first=None,
    help="""Hold embedding tables for trainers.

    A server starts empty: trainers say what it holds. It stays until it is stopped, and serves one
    training run after the other, one at a time. On one machine `pibroch train` starts servers by
    itself: --set embedding.exchange.servers=2. On several:

    on 10.0.0.5: pibroch embedding-server --rendezvous tcp://10.0.0.5:29600 --number 0

    on 10.0.0.6: pibroch embedding-server --rendezvous tcp://10.0.0.5:29600 --number 1

    trainers: pibroch train ... --set embedding.exchange=lookahead --set
    embedding.exchange.servers=2 --set embedding.exchange.rendezvous=tcp://10.0.0.5:29600

    All of them need the same secret in PIBROCH_RPC_SECRET, or the name of a file that holds it in
    PIBROCH_RPC_SECRET_FILE, unless they meet at a loopback address.
    PIBROCH_SERVERS_TLS=CERTIFICATE,KEY,AUTHORITIES (paths of PEM files, on servers and trainers)
    encrypts what travels.
    """,
)
