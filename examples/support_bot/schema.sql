-- The shop's records, and below them what the bot itself keeps. Money is in cents, times are UTC.
-- What must never happen twice, or never fit together wrongly, is refused here, whoever writes.

CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;

CREATE TABLE customers (
    id       TEXT PRIMARY KEY,
    name     TEXT NOT NULL,
    email    TEXT NOT NULL UNIQUE COLLATE NOCASE,
    postcode TEXT NOT NULL,
    address  TEXT NOT NULL
) STRICT;

CREATE TABLE variants (
    id          TEXT PRIMARY KEY,
    product     TEXT NOT NULL,
    options     TEXT NOT NULL,
    price_cents INTEGER NOT NULL CHECK (price_cents >= 0),
    stock       INTEGER NOT NULL CHECK (stock >= 0)
) STRICT;

CREATE TABLE orders (
    id           TEXT PRIMARY KEY,
    customer_id  TEXT NOT NULL REFERENCES customers (id),
    placed_on    TEXT NOT NULL,
    delivered_on TEXT,
    status       TEXT NOT NULL CHECK (status IN ('processing', 'shipped', 'delivered', 'cancelled')),
    CHECK ((status = 'delivered') = (delivered_on IS NOT NULL))
) STRICT;

-- One row for each single thing bought.
CREATE TABLE items (
    id          TEXT PRIMARY KEY,
    order_id    TEXT NOT NULL REFERENCES orders (id),
    variant_id  TEXT NOT NULL REFERENCES variants (id),
    price_cents INTEGER NOT NULL CHECK (price_cents >= 0),
    final_sale  INTEGER NOT NULL DEFAULT 0 CHECK (final_sale IN (0, 1)),
    status      TEXT NOT NULL DEFAULT 'bought' CHECK (status IN ('bought', 'returned', 'exchanged', 'cancelled'))
) STRICT;

CREATE TABLE payments (
    id           TEXT PRIMARY KEY,
    order_id     TEXT NOT NULL UNIQUE REFERENCES orders (id),
    method       TEXT NOT NULL CHECK (method IN ('card', 'paypal', 'gift card')),
    amount_cents INTEGER NOT NULL CHECK (amount_cents >= 0)
) STRICT;

-- Every irreversible action, under a key that is the same whenever the same action is asked for again.
CREATE TABLE actions (
    key     TEXT PRIMARY KEY,
    thread  TEXT NOT NULL,
    name    TEXT NOT NULL CHECK (name IN ('return', 'exchange', 'cancel')),
    outcome TEXT NOT NULL CHECK (json_valid(outcome)),
    at      TEXT NOT NULL DEFAULT (datetime('now'))
) STRICT;

CREATE TABLE returns (
    id         INTEGER PRIMARY KEY,
    action_key TEXT NOT NULL UNIQUE REFERENCES actions (key) DEFERRABLE INITIALLY DEFERRED,
    order_id   TEXT NOT NULL REFERENCES orders (id),
    reason     TEXT NOT NULL
) STRICT;

CREATE TABLE return_items (
    return_id INTEGER NOT NULL REFERENCES returns (id),
    item_id   TEXT NOT NULL PRIMARY KEY REFERENCES items (id)
) STRICT;

CREATE TABLE exchanges (
    id             INTEGER PRIMARY KEY,
    action_key     TEXT NOT NULL UNIQUE REFERENCES actions (key) DEFERRABLE INITIALLY DEFERRED,
    item_id        TEXT NOT NULL UNIQUE REFERENCES items (id),
    new_variant_id TEXT NOT NULL REFERENCES variants (id)
) STRICT;

CREATE TABLE cancellations (
    id         INTEGER PRIMARY KEY,
    action_key TEXT NOT NULL UNIQUE REFERENCES actions (key) DEFERRABLE INITIALLY DEFERRED,
    order_id   TEXT NOT NULL UNIQUE REFERENCES orders (id),
    reason     TEXT NOT NULL
) STRICT;

CREATE TABLE refunds (
    id              INTEGER PRIMARY KEY,
    payment_id      TEXT NOT NULL REFERENCES payments (id),
    return_id       INTEGER UNIQUE REFERENCES returns (id),
    cancellation_id INTEGER UNIQUE REFERENCES cancellations (id),
    amount_cents    INTEGER NOT NULL CHECK (amount_cents > 0),
    status          TEXT NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'paid')),
    CHECK ((return_id IS NULL) <> (cancellation_id IS NULL))
) STRICT;

CREATE TRIGGER refund_within_payment BEFORE INSERT ON refunds
WHEN NEW.amount_cents + (SELECT coalesce(sum(amount_cents), 0) FROM refunds WHERE payment_id = NEW.payment_id)
     > (SELECT amount_cents FROM payments WHERE id = NEW.payment_id)
BEGIN
    SELECT raise(ABORT, 'more would be refunded than was paid');
END;

CREATE TRIGGER returned_item_of_its_order BEFORE INSERT ON return_items
WHEN (SELECT order_id FROM items WHERE id = NEW.item_id) IS NOT (SELECT order_id FROM returns WHERE id = NEW.return_id)
BEGIN
    SELECT raise(ABORT, 'the item belongs to another order');
END;

CREATE TRIGGER item_changes_once BEFORE UPDATE OF status ON items
WHEN OLD.status <> 'bought'
BEGIN
    SELECT raise(ABORT, 'the item has been returned, exchanged or cancelled before');
END;

-- What the bot keeps ------------------------------------------------------------------------------------

-- One thread for each customer. `open` = something is left to do: a message to answer, a colleague to wait for.
CREATE TABLE threads (
    id          TEXT PRIMARY KEY,
    customer_id TEXT NOT NULL UNIQUE REFERENCES customers (id),
    open        INTEGER NOT NULL DEFAULT 0 CHECK (open IN (0, 1)),
    changed_at  TEXT NOT NULL DEFAULT (datetime('now'))
) STRICT;

-- What customers wrote, numbered from 1 in each thread. `ref` is the sender's own mark: sent twice, stored once.
CREATE TABLE inbox (
    thread TEXT NOT NULL REFERENCES threads (id),
    number INTEGER NOT NULL CHECK (number > 0),
    ref    TEXT NOT NULL,
    text   TEXT NOT NULL CHECK (length(text) > 0),
    at     TEXT NOT NULL DEFAULT (datetime('now')),
    PRIMARY KEY (thread, number),
    UNIQUE (thread, ref)
) STRICT;

-- Questions to colleagues, and their answers.
CREATE TABLE handovers (
    id           INTEGER PRIMARY KEY,
    key          TEXT NOT NULL UNIQUE,
    thread       TEXT NOT NULL REFERENCES threads (id),
    turn         INTEGER NOT NULL,
    kind         TEXT NOT NULL CHECK (kind IN ('approval', 'question')),
    summary      TEXT NOT NULL,
    amount_cents INTEGER CHECK (amount_cents > 0),
    decision     TEXT CHECK (decision IN ('approve', 'deny', 'reply')),
    message      TEXT NOT NULL DEFAULT '',
    asked_at     TEXT NOT NULL DEFAULT (datetime('now')),
    answered_at  TEXT,
    CHECK ((decision IS NULL) = (answered_at IS NULL))
) STRICT;

CREATE TRIGGER answered_once BEFORE UPDATE ON handovers
WHEN OLD.decision IS NOT NULL
BEGIN
    SELECT raise(ABORT, 'the question has been answered');
END;

-- Who is signed in. Only a hash of the token is stored.
CREATE TABLE sign_ins (
    token_hash  TEXT PRIMARY KEY,
    customer_id TEXT NOT NULL REFERENCES customers (id),
    at          TEXT NOT NULL DEFAULT (datetime('now'))
) STRICT;
