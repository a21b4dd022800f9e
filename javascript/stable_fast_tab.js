// The tab Stable Fast: what runs now, the sizes that are ready, and why images were not accelerated.

(function() {
    // [heading, value to sort by, text]; numbers sort downwards first
    const COLUMNS = [
        ['Size', (plan) => plan.label, (plan) => stableFast.sized(plan.label)],
        ['Part', (plan) => PARTS[plan.network] || plan.network || '', null],
        ['Before, ms', (plan) => plan.ms_before, (plan) => fixed(plan.ms_before, 1)],
        ['After, ms', (plan) => plan.ms_after, (plan) => fixed(plan.ms_after, 1)],
        ['Times faster', times, (plan) => fixed(times(plan), 1)],
        ['Steps made', (plan) => plan.replays, null],
        ['Last used', (plan) => plan.used_at, (plan) => age(plan.used_at)],
        ['Memory, MB', (plan) => plan.memory_mb, (plan) => fixed(plan.memory_mb, 0)],
        ['Rounding', (plan) => plan.error, (plan) => percent(plan.error)]
    ];
    const PARTS = {unet: 'image model', refiner: 'refiner', controlnet: 'ControlNet'};
    const WHY = ['Why', 'What to do', 'Steps of this image', 'Since the start', 'Last'];
    let view = null;
    let shown = null;
    // whether the layers are listed, though the tab is drawn anew each second
    let opened = false;
    let order = {column: 6, down: true};

    function fixed(value, digits) {
        return typeof value === 'number' ? value.toFixed(digits) : '–';
    }

    // two digits, as of 0.0012
    function percent(error) {
        return typeof error === 'number' ? `${Number((100 * error).toPrecision(2))} %` : '–';
    }

    function times(plan) {
        return typeof plan.speedup === 'number' ? plan.speedup : null;
    }

    function seconds(ago) {
        if (ago < 90) {
            return [Math.max(0, Math.round(ago)), 's ago'];
        }
        return ago < 5400 ? [Math.round(ago / 60), 'min ago'] : [Math.round(ago / 3600), 'h ago'];
    }

    function age(time) {
        return typeof time === 'number' ? seconds(Date.now() / 1000 - time) : ['–'];
    }

    function now(status) {
        const {add, addParts, addPieces} = stableFast;
        const head = addParts(view, 'p', ['Stable Fast', status.version, '·', status.enabled ? 'on' : 'off', '·']);
        head.appendChild(document.createTextNode(' '));
        const settings = add(head, 'button', 'Settings', 'sfast-link');
        settings.type = 'button';
        settings.addEventListener('click', stableFast.openSettings);
        const plan = stableFast.plansOf(status).find((each) => each.last_pass && times(each));
        const shows = plan && !status.no_gpu && status.enabled;
        if (shows) {
            addParts(view, 'p', [`${plan.speedup.toFixed(1)}×`, 'faster'], 'sfast-headline');
        }
        const state = add(view, 'p', undefined, `sfast-now sfast-is-${status.badge.state}`);
        addPieces(state, 'span', stableFast.pieces(status.badge, 'detail'));
        if (status.badge.help) {
            state.appendChild(document.createTextNode(' '));
            stableFast.help(state, status.badge.help);
        }
        stableFast.addNote(view, 'p', status.badge);
        if (shows) {
            const times = [`${plan.ms_before.toFixed(1)} → ${plan.ms_after.toFixed(1)}`, 'ms a step'];
            addParts(view, 'p', [...stableFast.sized(plan.label), '·', ...times]);
            const most = Math.max(plan.ms_before, plan.ms_after);
            stableFastCharts.bar(view, 'Original', plan.ms_before, most, 'sfast-before');
            stableFastCharts.bar(view, 'Stable Fast', plan.ms_after, most, 'sfast-after');
            add(view, 'p', 'Both were measured with this image’s own data when its size was prepared.', 'sfast-weak');
        }
        const {gpu, torch} = status.environment;
        addParts(view, 'p', [status.model || 'no model', '·', gpu || 'no GPU', '·', 'torch', torch], 'sfast-weak');
        memory(status);
    }

    // what is held of the GPU's memory, in addition to the model
    function memory(status) {
        const {add, addParts} = stableFast;
        const pool = status.accelerators.map((each) => each.graph_pool).find(Boolean);
        if (!pool) {
            return;
        }
        const all = status.environment.gpu_memory_mb;
        const eight = status.eight_bits ? Math.round(status.eight_bits.bytes / 2 ** 20) : 0;
        const held = [...(eight > 0 ? ['·', 'for 8 bits:', eight, 'MB'] : []), ...(all ? ['·', 'of the GPU:', all, 'MB'] : [])];
        addParts(view, 'p', ['GPU memory held for fast replays:', pool.memory_mb, 'MB', ...held]);
        if (all) {
            const gauge = add(view, 'div', undefined, 'sfast-gauge');
            gauge.setAttribute('role', 'img');
            gauge.setAttribute('aria-label', `${Math.round(100 * (pool.memory_mb + eight) / all)} %`);
            add(gauge, 'div').style.width = `${Math.min(100, 100 * (pool.memory_mb + eight) / all).toFixed(1)}%`;
        }
    }

    // which layers are computed in 8 bits, and which stay in half precision
    function eightBits(status) {
        const found = status.eight_bits;
        if (!found || (found.layers === 0 && found.kept.length === 0)) {
            return;
        }
        const {add, addParts} = stableFast;
        add(view, 'h3', '8 bits');
        const megabytes = Math.round(found.bytes / 2 ** 20);
        addParts(view, 'p', ['Layers computed in 8 bits:', found.layers, '·', 'GPU memory for them:', megabytes, 'MB']);
        if (found.kept.length === 0) {
            return;
        }
        const box = add(view, 'details');
        box.open = opened;
        box.addEventListener('toggle', () => {
            opened = box.open;
        });
        addParts(box, 'summary', ['Layers that stay in half precision:', found.kept.length]);
        add(box, 'p', '8 bits would change their results too much, by:');
        const list = add(box, 'ul');
        found.kept.forEach(([name, error]) => {
            const share = typeof error === 'number' ? `${Number((100 * error).toPrecision(2))} %` : 'an unknown amount';
            addParts(list, 'li', [name, share]);
        });
    }

    function sorted(plans) {
        const value = COLUMNS[order.column][1];
        const known = (plan) => value(plan) !== null && value(plan) !== undefined;
        const compare = (a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0);
        const rows = plans.filter(known).sort(compare);
        return [...(order.down ? rows.reverse() : rows), ...plans.filter((plan) => !known(plan))];
    }

    function plans(status) {
        const {add, addParts} = stableFast;
        const found = stableFast.plansOf(status);
        add(view, 'h3', 'Ready sizes');
        if (found.length === 0) {
            add(view, 'p', 'None yet. The first image of each size, number of images and length of the prompt makes it ready.');
            return;
        }
        const table = add(add(view, 'div', undefined, 'sfast-scroll'), 'table', undefined, 'sfast-cards');
        const head = add(add(table, 'thead'), 'tr');
        COLUMNS.forEach(([name], column) => {
            const cell = add(head, 'th', undefined, column > 1 ? 'sfast-number' : '');
            cell.setAttribute('scope', 'col');
            const mine = order.column === column;
            cell.setAttribute('aria-sort', mine ? (order.down ? 'descending' : 'ascending') : 'none');
            // the arrow is style.css's: hosts translate a heading by all of its text
            const button = add(cell, 'button', name);
            button.type = 'button';
            button.addEventListener('click', () => {
                order = {column, down: mine ? !order.down : column > 1};
                draw(shown);
            });
        });
        const body = add(table, 'tbody');
        sorted(found).forEach((plan) => {
            const row = add(body, 'tr', undefined, plan.last_pass ? 'sfast-last' : '');
            COLUMNS.forEach(([name, value, text], column) => {
                const said = text ? text(plan) : value(plan);
                const mark = column === 0 && plan.last_pass ? '(last image)' : null;
                const cell = addParts(row, 'td', [said, mark].flat(), column > 1 ? 'sfast-number' : '');
                if (column > 0) {
                    stableFast.labelled(cell, name);
                }
            });
        });
    }

    function reasons(status) {
        const {add, addParts, addPieces, help} = stableFast;
        add(view, 'h3', 'Not accelerated');
        if (status.reasons_listed.length === 0) {
            const nothing = ['Nothing: every step so far was accelerated or prepared.'];
            addPieces(view, 'p', status.no_gpu ? stableFast.pieces(status.badge, 'detail') : nothing);
            if (status.no_gpu && status.badge.help) {
                help(add(view, 'p'), status.badge.help);
            }
            return;
        }
        const table = add(add(view, 'div', undefined, 'sfast-scroll'), 'table', undefined, 'sfast-cards');
        const head = add(add(table, 'thead'), 'tr');
        WHY.forEach((name, column) => add(head, 'th', name, column > 1 ? 'sfast-number' : '').setAttribute('scope', 'col'));
        const body = add(table, 'tbody');
        status.reasons_listed.forEach((each) => {
            const row = add(body, 'tr', undefined, each.calls_last > 0 ? 'sfast-last' : '');
            addPieces(row, 'td', stableFast.pieces(each, 'reason'));
            help(add(row, 'td'), each.code);
            [[each.calls_last], [each.calls], seconds(each.seconds_ago)].forEach((said, column) => {
                stableFast.labelled(addParts(row, 'td', said, 'sfast-number'), WHY[column + 2]);
            });
        });
    }

    // the button of what the extension is not
    function switches(status) {
        [['off', status.enabled], ['on', !status.enabled]].forEach(([name, seen]) => {
            const button = document.getElementById(`stable_fast_${name}`);
            if (button) {
                button.classList.toggle('sfast-unseen', !seen);
            }
        });
    }

    function draw(status) {
        shown = status;
        if (status) {
            switches(status);
        }
        if (!view || !status || view.offsetParent === null) {
            return;
        }
        stableFast.redrawn(view, () => {
            view.textContent = '';
            now(status);
            plans(status);
            eightBits(status);
            reasons(status);
        });
    }

    onUiLoaded(() => {
        view = view || document.getElementById('stable_fast_view');
        if (!view || view.dataset.ready) {
            return;
        }
        view.dataset.ready = 'yes';
        stableFast.onStatus(draw);
        // asks when the tab is opened, not before
        new IntersectionObserver((entries) => {
            if (entries.some((entry) => entry.isIntersecting)) {
                stableFast.refresh();
            }
        }).observe(view.parentElement);
    });
})();
