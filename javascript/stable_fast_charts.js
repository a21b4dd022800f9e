// Charts of the tab Stable Fast, without a library: bars of a measurement, and measurements of one size over time.

(function() {
    const SVG = 'http://www.w3.org/2000/svg';
    const HEIGHT = 220;
    const EDGE = {left: 44, right: 14, top: 34, bottom: 26};
    // pixels that a date, and at most a letter, takes in the text of the chart
    const DATE = 84;
    const LETTER = 7;
    const STATED = [['driver', 'driver'], ['torch', 'torch'], ['version', 'Stable Fast']];

    function drawn(parent, tag, attributes, text) {
        const element = document.createElementNS(SVG, tag);
        Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
        if (text !== undefined) {
            element.textContent = text;
        }
        parent.appendChild(element);
        return element;
    }

    // lengths compare down the page: what stands left and right of the bars is as wide in each row
    function bar(parent, name, value, most, kind, times) {
        const {add, addParts} = stableFast;
        const row = add(parent, 'div', undefined, `sfast-bar ${kind}`);
        add(row, 'span', name);
        add(add(row, 'div'), 'div').style.width = `${Math.max(1, Math.round(100 * value / most))}%`;
        addParts(row, 'span', [`${value.toFixed(1)} ms`, times ? `${times.toFixed(1)}×` : null]);
    }

    function rowsOf(measurement) {
        return measurement.rows.filter((row) => typeof row.ms_after === 'number' && typeof row.ms_before === 'number');
    }

    function alike(some, other) {
        return some.model === other.model && some.gpu === other.gpu;
    }

    function day(measurement) {
        return String(measurement.when).slice(0, 10);
    }

    // the last measurement, next to the one before it of the same kind of model and card
    function bars(parent, measurements) {
        const {add, addParts, sized} = stableFast;
        const last = measurements[measurements.length - 1];
        const rows = last ? rowsOf(last) : [];
        if (rows.length === 0) {
            return;
        }
        const labels = rows.map((row) => row.label);
        const known = (each) => labels.every((label) => rowsOf(each).some((row) => row.label === label));
        const before = measurements.slice(0, -1).reverse().find((each) => alike(each, last) && known(each));
        const earlier = (label) => rowsOf(before).find((row) => row.label === label);
        const most = Math.max(...rows.flatMap((row) => [row.ms_before, row.ms_after, before ? earlier(row.label).ms_after : 0]));
        const chart = add(parent, 'div', undefined, 'sfast-bars');
        addParts(chart, 'p', ['The last measurement', '·', 'milliseconds a step'], 'sfast-strong');
        rows.forEach((row) => {
            addParts(chart, 'p', [sized(row.label)]);
            bar(chart, 'Original', row.ms_before, most, 'sfast-before');
            bar(chart, 'Stable Fast', row.ms_after, most, 'sfast-after', row.ms_before / row.ms_after);
            if (before) {
                const was = earlier(row.label);
                bar(chart, 'Last time', was.ms_after, most, 'sfast-earlier', was.ms_before / was.ms_after);
            }
        });
        if (before) {
            const versions = STATED.filter(([key]) => before[key]).map(([key, name]) => [name, before[key]]);
            addParts(chart, 'p', ['Last time:', day(before), ...versions.flat()], 'sfast-weak');
        }
    }

    // the sizes that were measured more than once, with one kind of model on one card
    function series(measurements) {
        const found = new Map();
        measurements.forEach((each) => rowsOf(each).forEach((row) => {
            const key = JSON.stringify([row.label, each.model, each.gpu]);
            found.set(key, [...(found.get(key) || []), {...each, ...row}]);
        }));
        return new Map([...found].filter(([, points]) => points.length > 1));
    }

    // a round number that about four steps of reach the value
    function stepTo(value) {
        const rough = value / 4;
        const unit = 10 ** Math.floor(Math.log10(rough));
        return [1, 2, 5, 10].map((times) => times * unit).find((step) => step >= rough);
    }

    function axes(svg, width, points, x, y, most, step) {
        for (let value = 0; value <= most; value += step) {
            const at = y(value);
            drawn(svg, 'line', {x1: EDGE.left, x2: width - EDGE.right, y1: at, y2: at, class: 'sfast-grid'});
            drawn(svg, 'text', {x: EDGE.left - 6, y: at + 4, 'text-anchor': 'end'}, String(Number(value.toPrecision(6))));
        }
        drawn(svg, 'text', {x: 0, y: 12}, 'ms a step');
        let free = -Infinity;
        const last = points.length - 1;
        points.forEach((point, index) => {
            // the last one has its date in any case
            const room = index === 0 || index === last || (x(index) >= free && x(last) - x(index) >= 1.5 * DATE);
            if (room) {
                const anchor = index === 0 ? 'start' : index === last ? 'end' : 'middle';
                drawn(svg, 'text', {x: x(index), y: HEIGHT - 6, 'text-anchor': anchor}, day(point));
                // dates in between are written around their place
                free = x(index) + (index === 0 ? 1.5 : 1) * DATE;
            }
        });
    }

    // where another driver, torch or version of the extension began
    function changes(svg, points, x, width) {
        let free = -Infinity;
        points.slice(1).forEach((point, index) => {
            const other = STATED.filter(([key]) => point[key] !== points[index][key]);
            if (other.length === 0) {
                return;
            }
            const at = (x(index) + x(index + 1)) / 2;
            drawn(svg, 'line', {x1: at, x2: at, y1: EDGE.top - 4, y2: HEIGHT - EDGE.bottom, class: 'sfast-change'});
            const [[key, name]] = other;
            const text = `${name} ${point[key] || '–'}`;
            const begins = Math.min(at + 2, width - EDGE.right - LETTER * text.length);
            if (begins >= free) {
                drawn(svg, 'text', {x: begins, y: EDGE.top - 8}, text);
                free = begins + LETTER * (text.length + 1);
            }
        });
    }

    function line(svg, points, x, y, name, kind) {
        const value = (point) => point[kind === 'sfast-before' ? 'ms_before' : 'ms_after'];
        const path = points.map((point, index) => `${x(index)},${y(value(point))}`).join(' ');
        drawn(svg, 'polyline', {points: path, class: `sfast-line ${kind}`});
        points.forEach((point, index) => {
            const dot = drawn(svg, 'circle', {cx: x(index), cy: y(value(point)), r: 3.5, class: kind});
            const versions = STATED.filter(([key]) => point[key]).map(([key, each]) => `${each} ${point[key]}`);
            const when = String(point.when).slice(0, 16).replace('T', ' ');
            drawn(dot, 'title', {}, [when, name, `${value(point).toFixed(1)} ms`, ...versions].join(', '));
        });
    }

    function curve(parent, measurements, chosen, choose) {
        const {add, addParts, sized} = stableFast;
        const found = series(measurements);
        if (found.size === 0) {
            return;
        }
        // that of the last measurement, unless another one was chosen
        const keys = [...found.keys()];
        const newest = (key) => found.get(key)[found.get(key).length - 1].when;
        const key = found.has(chosen) ? chosen : keys.reduce((one, other) => (newest(other) > newest(one) ? other : one));
        const points = found.get(key);
        const box = add(parent, 'div', undefined, 'sfast-curve');
        addParts(box, 'p', ['Over time', '·', ...sized(points[0].label)], 'sfast-strong');
        if (keys.length > 1) {
            const label = add(add(box, 'p'), 'label', 'Size');
            const select = add(label, 'select');
            keys.forEach((each) => {
                const [name, model, gpu] = JSON.parse(each);
                const option = add(select, 'option', [stableFast.typeset(name), gpu, model].filter(Boolean).join(', '));
                option.value = each;
                option.selected = each === key;
            });
            select.addEventListener('change', () => choose(select.value));
        }
        const width = Math.max(260, Math.floor(box.clientWidth));
        const most = Math.max(...points.flatMap((point) => [point.ms_before, point.ms_after]));
        const step = stepTo(most);
        const top = Math.ceil(most / step) * step;
        const x = (index) => EDGE.left + 8 + index * (width - EDGE.left - EDGE.right - 16) / (points.length - 1);
        const y = (value) => EDGE.top + (1 - value / top) * (HEIGHT - EDGE.top - EDGE.bottom);
        const svg = drawn(box, 'svg', {viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: 'img'});
        const from = `${day(points[0])}, ${day(points[points.length - 1])}`;
        svg.setAttribute('aria-label', `Milliseconds a step, ${from}. The numbers are in the table.`);
        axes(svg, width, points, x, y, top, step);
        changes(svg, points, x, width);
        line(svg, points, x, y, 'Original', 'sfast-before');
        line(svg, points, x, y, 'Stable Fast', 'sfast-after');
        const legend = add(box, 'p', undefined, 'sfast-legend');
        [['sfast-before', 'Original'], ['sfast-after', 'Stable Fast'], ['sfast-other', 'another driver or version']]
            .forEach(([kind, name]) => {
                const pair = add(legend, 'span');
                add(pair, 'span', undefined, `sfast-key ${kind}`);
                add(pair, 'span', name);
            });
    }

    window.stableFastCharts = {bar, bars, curve};
})();
