// The tab Stable Fast: the progress and the result of Prepare and Measure, and the measurements that were kept.

(function() {
    const MEASUREMENTS = './sfast/v1/measurements';
    const STATES = {
        waiting: 'Waiting for the image to end',
        running: 'Running',
        done: 'Done',
        cancelled: 'Cancelled',
        failed: 'Failed'
    };
    const KINDS = {prepare: 'Prepare', measure: 'Measure', compare: 'Compare'};
    const ROWS = ['Size', 'Original, ms', 'Stable Fast, ms', 'Times faster', 'Result'];
    const KEPT = ['Date', 'Size', 'Original, ms', 'Stable Fast, ms', 'Times faster', 'Driver', 'torch', 'Version', 'Card', 'Model'];
    let view = null;
    let live = null;
    let shown;
    let kept = [];
    let open = false;
    // of the curve: another size than that of the last measurement
    let chosen;

    function fixed(value) {
        return typeof value === 'number' ? value.toFixed(1) : '–';
    }

    function active(job) {
        return Boolean(job) && (job.state === 'waiting' || job.state === 'running');
    }

    function table(parent, heads, rows) {
        const {add, addParts, labelled} = stableFast;
        const made = add(add(parent, 'div', undefined, 'sfast-scroll'), 'table', undefined, 'sfast-cards');
        const head = add(add(made, 'thead'), 'tr');
        const kind = (column) => (/, ms$|^Times/.test(heads[column]) ? 'sfast-number' : '');
        heads.forEach((name, column) => add(head, 'th', name, kind(column)).setAttribute('scope', 'col'));
        const body = add(made, 'tbody');
        rows.forEach((cells) => {
            const row = add(body, 'tr');
            cells.forEach((cell, column) => {
                const made = (Array.isArray(cell) ? addParts : add)(row, 'td', cell, kind(column));
                if (column > 0) {
                    labelled(made, heads[column]);
                }
            });
        });
    }

    function result(row) {
        if (row.reason) {
            return row.reason;
        }
        return row.ready ? 'Ready' : 'Not ready';
    }

    function progress(job) {
        const {add, addParts, sized} = stableFast;
        const state = [KINDS[job.kind] || job.kind, STATES[job.state] || job.state, `${job.done} / ${job.total}`];
        addParts(view, 'p', state, 'sfast-strong');
        if (active(job)) {
            const bar = add(view, 'progress');
            bar.max = job.total;
            bar.value = job.done;
            bar.setAttribute('aria-label', KINDS[job.kind] || job.kind);
            const left = typeof job.seconds_left === 'number' ? [Math.ceil(job.seconds_left), 's left'] : [];
            addParts(view, 'p', [job.label ? sized(job.label) : null, ...left]);
        }
        if (job.message) {
            add(view, 'p', job.message, job.state === 'failed' ? 'sfast-error' : '');
        }
        if (job.rows.length > 0 && job.kind !== 'compare') {
            table(view, ROWS, job.rows.map((row) => [
                sized(row.label), fixed(row.ms_before), fixed(row.ms_after), fixed(row.speedup), result(row)
            ]));
        }
    }

    function history() {
        const {add, sized} = stableFast;
        if (kept.length === 0) {
            return;
        }
        const details = add(view, 'details');
        details.open = open;
        details.addEventListener('toggle', () => { open = details.open; });
        add(details, 'summary', 'Measurements that were kept');
        const rows = [...kept].reverse().flatMap((each) => each.rows.map((row) => [
            String(each.when).slice(0, 16).replace('T', ' '), sized(row.label),
            fixed(row.ms_before), fixed(row.ms_after), fixed(row.speedup),
            each.driver || '–', each.torch || '–', each.version || '–', each.gpu || 'CPU', each.model || '–'
        ]));
        table(details, KEPT, rows);
    }

    function draw() {
        if (!view || view.offsetParent === null) {
            return;
        }
        stableFast.redrawn(view, () => {
            view.textContent = '';
            if (shown) {
                progress(shown);
            }
            stableFastComparison.draw(view);
            stableFastCharts.bars(view, kept);
            stableFastCharts.curve(view, kept, chosen, (key) => {
                chosen = key;
                draw();
            });
            history();
        });
    }

    async function load() {
        try {
            const answer = await fetch(MEASUREMENTS);
            const found = answer.ok ? await answer.json() : [];
            kept = Array.isArray(found) ? found : [];
        } catch (error) {
            kept = [];
        }
        await stableFastComparison.load();
        draw();
    }

    function follow(status) {
        const job = status.job || null;
        // there is something to cancel only while it runs
        const cancel = document.getElementById('stable_fast_cancel');
        if (cancel) {
            cancel.classList.toggle('sfast-unseen', !active(job));
        }
        const before = shown;
        const other = JSON.stringify(job) !== JSON.stringify(before);
        shown = job;
        if (active(job)) {
            stableFast.watch();
        } else if (job && other && before !== undefined) {
            // also if it began and ended between two answers
            // a screen reader is told of the end, not of each step
            live.textContent = '';
            stableFast.addParts(live, 'span', [KINDS[job && job.kind], STATES[job && job.state]]);
            load();
        }
        if (other) {
            draw();
        }
    }

    // the cursor goes to the field that a fault names; the page draws the fault a moment after the event
    function toFault() {
        setTimeout(() => {
            const fault = document.querySelector('#stable_fast_told .sfast-error[data-field]');
            const named = fault && document.querySelector(`#${fault.dataset.field} :is(textarea, input)`);
            document.querySelectorAll('[id^="stable_fast_"] [aria-invalid]').forEach((each) => each.removeAttribute('aria-invalid'));
            if (named) {
                named.setAttribute('aria-invalid', 'true');
                named.focus();
                if (named.select && named.type !== 'checkbox') {
                    named.select();
                }
            }
        }, 100);
    }

    window.stableFastJobs = {toFault};

    onUiLoaded(() => {
        view = view || document.getElementById('stable_fast_job');
        if (!view || view.dataset.ready) {
            return;
        }
        view.dataset.ready = 'yes';
        live = stableFast.add(view.parentElement, 'div', undefined, 'sfast-live sfast-job-live');
        live.setAttribute('role', 'status');
        stableFast.onStatus(follow);
        new IntersectionObserver((entries) => {
            if (entries.some((entry) => entry.isIntersecting)) {
                load();
            }
        }).observe(view.parentElement);
        // the curve is as wide as the page
        let width = window.innerWidth;
        window.addEventListener('resize', () => {
            if (window.innerWidth !== width) {
                width = window.innerWidth;
                draw();
            }
        });
    });
})();
