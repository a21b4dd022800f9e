// The badge below the Generate button: whether the last image was accelerated, how much, and why not.

(function() {
    const URL = './sfast/v1/status';
    const TABS = ['txt2img', 'img2img', 'control'];
    const PERIOD = 1000;
    // polls without work after which nothing more is expected: before any, as the job of a click may begin late, and after
    const UNTIL_WORK = 20;
    const AFTER_WORK = 5;
    // of the window, to the details of a badge
    const EDGE = 8;
    const SIGNS = {on: '●', partly: '◐', preparing: '◌', ready: '○', original: '▲', off: '■', none: '■', unknown: '?'};

    const badges = [];
    const listeners = [];
    let live = null;
    let timer = null;
    let waiting = false;
    let idle = 0;
    let worked = false;
    let last = null;

    // Python writes "512x512" and "->", for consoles of any code page; names of models stay as they are
    function typeset(text) {
        return String(text).replace(/(\d)x(?=\d|\b)/g, '$1×').replace(/->/g, '→').replace(/× *, /g, '× · ');
    }

    function add(parent, tag, text, name) {
        const element = document.createElement(tag);
        // textContent, never innerHTML: reasons carry names of models and of other extensions
        element.textContent = text === undefined ? '' : text;
        if (name) {
            element.className = name;
        }
        parent.appendChild(element);
        return element;
    }

    // each piece in its own element: a host translates the texts that it finds as a whole, so none is put together
    function addParts(parent, tag, parts, name) {
        const element = add(parent, tag, undefined, name);
        parts.flat().filter((part) => part !== null && part !== undefined).forEach((part, index) => {
            if (index > 0) {
                element.appendChild(document.createTextNode(' '));
            }
            add(element, 'span', part, 'sfast-part');
        });
        return element;
    }

    // of a sentence; an extension that was updated and not yet started again does not give them
    function pieces(object, name) {
        return object[`${name}_parts`] || [object[name]];
    }

    // the heading of a cell's column, seen where a row is a card
    function labelled(cell, name) {
        const label = document.createElement('span');
        label.className = 'sfast-label';
        label.textContent = name;
        cell.insertBefore(label, cell.firstChild);
        return cell;
    }

    function addPieces(parent, tag, parts, name) {
        const element = add(parent, tag, undefined, name);
        fill(element, parts);
        return element;
    }

    // a host that translates a text drops the spaces around it, so they stand by themselves
    function fill(element, parts) {
        parts.flatMap((part) => String(part).split(/^(\s+)|(\s+)$/)).filter(Boolean).forEach((part) => {
            if (part.trim()) {
                add(element, 'span', part, 'sfast-part');
            } else {
                element.appendChild(document.createTextNode(part));
            }
        });
    }

    // numbers and words of "512x512, 1 image, 77 tokens" or "VAE decoder, 512x512"; another name stays whole
    function sized(name) {
        const text = typeset(name);
        const label = /^(\d+×\d+,|VAE (de|en)coder, \d+×\d+)/;
        return (label.test(text) && text.match(/\d+×\d+,?|\d+|[^\s\d][^\d]*[^\s\d]/g)) || [text];
    }

    function planParts(plan) {
        if (typeof plan.speedup !== 'number') {
            return [sized(plan.label), 'not compared in time'].flat();
        }
        const [before, after] = [plan.ms_before, plan.ms_after].map((value) => value.toFixed(1));
        return [...sized(plan.label), `${plan.speedup.toFixed(1)}×`, `${before} → ${after}`, 'ms a step'];
    }

    function plansOf(status) {
        return status.accelerators.flatMap((each) => (each.plans || []).map((plan) => ({...plan, network: each.name})));
    }

    function details(panel, status) {
        panel.textContent = '';
        addPieces(panel, 'div', pieces(status.badge, 'detail'), 'sfast-strong');
        addNote(panel, 'div', status.badge);
        if (!status.no_gpu) {
            plansOf(status).filter((plan) => plan.last_pass).forEach((plan) => addParts(panel, 'div', planParts(plan)));
        }
        addParts(panel, 'div', [status.environment.gpu || 'no GPU', '·', 'torch', status.environment.torch], 'sfast-weak');
        if (status.badge.help) {
            help(add(panel, 'div'), status.badge.help);
        }
        const link = add(panel, 'button', 'Open the tab Stable Fast', 'sfast-link');
        link.type = 'button';
        link.addEventListener('click', openTab);
    }

    // what the user should know in addition, such as of 8 bits
    function addNote(parent, tag, badge) {
        if (badge.note) {
            const note = addPieces(parent, tag, pieces(badge, 'note'), 'sfast-note');
            note.appendChild(document.createTextNode('. '));
            help(note, badge.note_help);
        }
    }

    // while an image is made everything is drawn anew each second; who is at a link by keyboard stays there
    function redrawn(root, draw) {
        const stops = () => Array.from(root.querySelectorAll('a, button, summary'));
        const place = stops().indexOf(document.activeElement);
        draw();
        if (place >= 0 && stops()[place]) {
            stops()[place].focus();
        }
    }

    // the entry of the page of troubleshooting
    function help(parent, code) {
        const link = add(parent, 'a', 'What to do');
        link.href = './sfast/v1/help#' + encodeURIComponent(code);
        link.target = '_blank';
    }

    function openTab() {
        // SD.Next's modern theme has its own buttons for tabs, with two letters of their keys as text
        const [own] = gradioApp().querySelectorAll('button[tabitemid*="#tab_stable_fast_"]');
        const buttons = Array.from(gradioApp().querySelectorAll('#tabs button'));
        const panels = Array.from(gradioApp().querySelectorAll('#tabs > .tabitem'));
        // a localisation may have another name on the button, which has the place of its panel
        const place = panels.findIndex((panel) => panel.id === 'tab_stable_fast');
        const tab = own || buttons.find((button) => button.textContent.trim() === 'Stable Fast') || buttons[place];
        if (tab) {
            tab.click();
        }
    }

    // what lies behind an element: some themes have no colour, or a transparent one, here
    function cover(element) {
        Object.assign(element.style, {backgroundColor: '', color: ''});
        for (let behind = element; behind; behind = behind.parentElement) {
            const colour = getComputedStyle(behind).backgroundColor;
            const [, , , alpha = '1'] = (colour || '').match(/[\d.]+/g) || [];
            if (colour && colour !== 'transparent' && Number(alpha) === 1) {
                // its own is left to the theme, which may come after the page
                element.style.backgroundColor = behind === element ? '' : colour;
                return;
            }
        }
        Object.assign(element.style, {backgroundColor: 'Canvas', color: 'CanvasText'});
    }

    // below its button, or above if there is no room: fixed, as columns of the host cut off what stands out of them
    function stand({button, panel}) {
        const is = panel.getBoundingClientRect();
        if (is.height === 0) {
            return;
        }
        const at = button.getBoundingClientRect();
        const left = Math.max(EDGE, Math.min(at.right - is.width, window.innerWidth - is.width - EDGE));
        const above = at.bottom + is.height > window.innerHeight && at.top > is.height;
        const top = above ? at.top - is.height : at.bottom;
        // by how far it is off: an ancestor with a transform is what it is fixed to
        panel.style.left = `${(parseFloat(panel.style.left) || 0) + left - is.left}px`;
        panel.style.top = `${(parseFloat(panel.style.top) || 0) + top - is.top}px`;
    }

    // how much of a preparation is over, behind the words of the badge
    function progressOf(status) {
        const done = status && status.badge.progress;
        return typeof done === 'number' ? `${Math.round(100 * done)}%` : '0%';
    }

    function write(state, text, status) {
        const parts = (status ? pieces(status.badge, 'text') : [text]).map(state === 'original' ? String : typeset);
        const said = parts.join('');
        for (const {button, label, sign, panel} of badges) {
            button.style.backgroundSize = `${progressOf(status)} 2px`;
            if (button.dataset.state !== state || label.textContent !== said) {
                button.dataset.state = state;
                sign.textContent = SIGNS[state] || SIGNS.unknown;
                label.textContent = '';
                fill(label, parts);
            }
            if (status) {
                redrawn(panel, () => details(panel, status));
            } else {
                panel.textContent = said;
            }
        }
        badges.forEach(stand);
        // a screen reader is told of another state, not of each number
        if (live && live.dataset.state !== state) {
            live.dataset.state = state;
            live.textContent = '';
            addParts(live, 'span', ['Stable Fast', ...parts.map((part) => part.trim())]);
        }
    }

    async function refresh() {
        // AUTOMATIC1111 empties the page while it reloads its UI; a request before it has added its routes would end it
        if (live && live.isConnected === false) {
            return null;
        }
        try {
            const answer = await fetch(URL);
            if (answer.status === 401) {
                write('unknown', 'log in for status', null);
                return null;
            }
            if (!answer.ok) {
                throw new Error(String(answer.status));
            }
            last = await answer.json();
            write(last.badge.state, last.badge.text, last);
            listeners.forEach((listener) => listener(last));
            return last;
        } catch (error) {
            write('unknown', 'no status', null);
            return null;
        }
    }

    async function poll() {
        // a server that is busy for minutes would get all requests at once then, and the host's own wait behind them
        if (document.hidden || waiting) {
            return;
        }
        waiting = true;
        let status = null;
        try {
            status = await refresh();
        } finally {
            waiting = false;
        }
        const works = Boolean(status && (status.busy || status.preparing));
        worked = worked || works;
        idle = works ? 0 : idle + 1;
        if (idle >= (worked ? AFTER_WORK : UNTIL_WORK)) {
            clearInterval(timer);
            timer = null;
        }
    }

    function watch(beginsLate = false) {
        idle = 0;
        worked = !beginsLate;
        if (timer === null) {
            timer = setInterval(poll, PERIOD);
        }
    }

    function make() {
        const box = document.createElement('div');
        box.className = 'sfast-badge';
        const button = add(box, 'button', undefined, 'sfast-state');
        button.type = 'button';
        button.dataset.state = 'unknown';
        const sign = add(button, 'span', SIGNS.unknown, 'sfast-sign');
        sign.setAttribute('aria-hidden', 'true');
        add(button, 'span', 'Stable Fast', 'sfast-name');
        const label = add(button, 'span', '…', 'sfast-text');
        const panel = add(box, 'div', undefined, 'sfast-details');
        panel.id = `stable_fast_details_${badges.length}`;
        button.setAttribute('aria-describedby', panel.id);
        button.setAttribute('aria-expanded', 'false');
        const pin = (on) => {
            box.classList.toggle('sfast-pinned', on);
            // though it is pointed at, or has the focus
            box.classList.toggle('sfast-closed', !on);
            button.setAttribute('aria-expanded', String(on));
        };
        button.addEventListener('click', () => {
            pin(button.getAttribute('aria-expanded') === 'false');
            look();
        });
        const look = () => {
            cover(panel);
            stand({button, panel});
            refresh();
        };
        const reopen = () => box.classList.toggle('sfast-closed', false);
        box.addEventListener('mouseenter', () => {
            reopen();
            look();
        });
        box.addEventListener('focusout', reopen);
        button.addEventListener('focus', look);
        box.addEventListener('keydown', (event) => {
            if (event.key === 'Escape') {
                // the host would interrupt the image
                event.stopPropagation();
                button.focus();
                pin(false);
            }
        });
        return {box, button, sign, label, panel};
    }

    // after each update of the page: SD.Next's modern theme moves buttons after they were made, into other buttons, which
    // cut off what stands out of them; there the badge is the last of the group, and moves with it
    function place() {
        TABS.forEach((tab, index) => {
            const button = document.getElementById(`${tab}_generate`);
            if (!button) {
                return;
            }
            badges[index] = badges[index] || make();
            const {box} = badges[index];
            const group = button.closest(`#${tab}_generate_group`);
            const others = group ? Array.from(group.children).filter((each) => each !== box) : [];
            const before = others.pop() || button.closest(`#${tab}_generate_box`) || button;
            if (box.previousElementSibling !== before) {
                before.after(box);
                cover(badges[index].button);
            }
        });
    }

    function start() {
        if (live) {
            return;
        }
        live = document.createElement('div');
        live.className = 'sfast-live';
        live.setAttribute('role', 'status');
        document.body.appendChild(live);
        place();
        if (typeof onAfterUiUpdate === 'function') {
            onAfterUiUpdate(place);
        }
        document.addEventListener('click', (event) => {
            const target = event.target;
            if (target && target.closest && target.closest(TABS.map((tab) => `#${tab}_generate`).join(','))) {
                watch(true);
            }
        }, true);
        // the event of a column that scrolls does not rise
        window.addEventListener('scroll', () => badges.forEach(stand), {capture: true, passive: true});
        window.addEventListener('resize', () => badges.forEach(stand));
        document.addEventListener('visibilitychange', () => {
            if (!document.hidden) {
                refresh();
            }
        });
        refresh();
    }

    // a tab by the id of its panel, whatever a localisation has written on its button
    function openPanel(root, id) {
        const panels = Array.from(gradioApp().querySelectorAll(`${root} > .tabitem`));
        const buttons = Array.from(gradioApp().querySelectorAll(`${root} > .tab-nav button`));
        const place = panels.findIndex((panel) => panel.id === id);
        if (buttons[place]) {
            buttons[place].click();
        }
        return Boolean(buttons[place]);
    }

    // AUTOMATIC1111 and Forge have "Settings", SD.Next "System", and its modern theme a button
    function openSettings() {
        if (!openPanel('#tabs', 'tab_settings') && !openPanel('#tabs', 'tab_system')) {
            const button = document.getElementById('btn_settings');
            if (button) {
                button.click();
            }
        }
        return ['settings_stable_fast', 'settings_section_tab_stable_fast'].some((id) => openPanel('#settings', id));
    }

    // if the page may not write to the clipboard, as over plain http, the text stays there to be copied by hand
    async function copy(text) {
        let copied = false;
        try {
            await navigator.clipboard.writeText(text);
            copied = true;
        } catch (error) {
            copied = false;
        }
        const told = document.getElementById('stable_fast_copied');
        if (told) {
            told.textContent = '';
            add(told, 'span', copied ? 'Copied' : 'Not copied: select the text below, and copy it', copied ? 'sfast-done' : 'sfast-error');
        }
    }

    // for the tab, in other files
    window.stableFast = {
        refresh, watch, sized, typeset, help, redrawn, add, addParts, addPieces, addNote, labelled, pieces, planParts, plansOf, copy, openSettings,
        onStatus: (listener) => {
            listeners.push(listener);
            if (last) {
                listener(last);
            }
        }
    };

    onUiLoaded(start);

    // not every host has it
    if (typeof onOptionsChanged === 'function') {
        onOptionsChanged(() => {
            if (live) {
                refresh();
            }
        });
    }
})();
