-- A small made-up shop to try the bot on. Dates count back from the day it is created.

INSERT INTO customers VALUES
    ('C1', 'Nadia Okafor',  'nadia@shop.example',  '4021',  '12 Quarry Lane, Brenton'),
    ('C2', 'Tomas Lindqvist', 'tomas@shop.example', '77310', '3 Harbour Steps, Vell'),
    ('C3', 'Ines Duarte',   'ines@shop.example',   '1180',  '88 Mill Road, Ostrow');

INSERT INTO variants VALUES
    ('BOOT-39', 'Trail boots',      'size 39',        8900, 4),
    ('BOOT-40', 'Trail boots',      'size 40',        8900, 2),
    ('BOOT-41', 'Trail boots',      'size 41',        8900, 0),
    ('LAMP-BR', 'Desk lamp',        'brass',          4550, 7),
    ('LAMP-BK', 'Desk lamp',        'black',          4550, 1),
    ('TENT-2',  'Tent',             'two persons',   24900, 3),
    ('TENT-4',  'Tent',             'four persons',  39900, 3),
    ('MUG-GR',  'Enamel mug',       'green',          1250, 40),
    ('CARD-50', 'Gift voucher',     '50',             5000, 999);

INSERT INTO orders VALUES
    ('W1001', 'C1', date('now', '-12 days'), date('now', '-8 days'),  'delivered'),
    ('W1002', 'C1', date('now', '-1 days'),  NULL,                    'processing'),
    ('W1003', 'C1', date('now', '-80 days'), date('now', '-75 days'), 'delivered'),
    ('W2001', 'C2', date('now', '-9 days'),  date('now', '-5 days'),  'delivered'),
    ('W2002', 'C2', date('now', '-3 days'),  NULL,                    'shipped'),
    ('W3001', 'C3', date('now', '-20 days'), date('now', '-15 days'), 'delivered');

INSERT INTO items (id, order_id, variant_id, price_cents, final_sale) VALUES
    ('W1001-1', 'W1001', 'BOOT-39',  8900, 0),
    ('W1001-2', 'W1001', 'LAMP-BR',  4550, 0),
    ('W1001-3', 'W1001', 'CARD-50',  5000, 1),
    ('W1002-1', 'W1002', 'MUG-GR',   1250, 0),
    ('W1002-2', 'W1002', 'MUG-GR',   1250, 0),
    ('W1003-1', 'W1003', 'LAMP-BK',  4550, 0),
    ('W2001-1', 'W2001', 'TENT-4',  39900, 0),
    ('W2001-2', 'W2001', 'MUG-GR',   1250, 0),
    ('W2002-1', 'W2002', 'BOOT-40',  8900, 0),
    ('W3001-1', 'W3001', 'LAMP-BK',  4550, 0);

INSERT INTO payments VALUES
    ('P1001', 'W1001', 'card',      18450),
    ('P1002', 'W1002', 'paypal',     2500),
    ('P1003', 'W1003', 'card',       4550),
    ('P2001', 'W2001', 'card',      41150),
    ('P2002', 'W2002', 'gift card',  8900),
    ('P3001', 'W3001', 'paypal',     4550);

INSERT INTO meta VALUES ('sample', 'yes');
