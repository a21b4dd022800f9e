// The tab Stable Fast: the last image with and without the extension, next to each other.

(function() {
    const ROOT = './sfast/v1/comparison';
    let found = null;
    // the address of an image stays the same: another number makes the browser ask anew
    let number = 0;

    function side(parent, name, made, file) {
        const {add, addParts} = stableFast;
        const figure = add(parent, 'figure');
        addParts(figure, 'figcaption', [name, '·', `${made.seconds.toFixed(2)} s`]);
        const image = add(figure, 'img');
        image.src = `${ROOT}/${file}.png?${number}`;
        image.alt = name;
        image.width = made.width;
        image.height = made.height;
    }

    function difference(parent) {
        const {add, addParts} = stableFast;
        const {mean_difference: mean, largest_difference: largest} = found;
        if (!found.same_request) {
            add(parent, 'p', 'The prompt or the seed is chosen at random for each image: these two cannot be compared.', 'sfast-note');
        } else if (typeof mean === 'number') {
            const said = String(Number(mean.toPrecision(2)));
            addParts(parent, 'p', ['Mean difference of the pixels:', said, 'of 255', '·', 'largest:', largest, 'of 255']);
        }
    }

    function draw(parent) {
        if (!found) {
            return;
        }
        const {add, addParts} = stableFast;
        const box = add(parent, 'div', undefined, 'sfast-comparison');
        if (typeof found.times === 'number') {
            const times = [`${found.times.toFixed(1)}×`, found.times < 1 ? 'as fast' : 'faster'];
            addParts(box, 'p', [...times, 'for a whole image'], 'sfast-headline');
        }
        difference(box);
        if (found.accelerated.reason) {
            addParts(box, 'p', ['Not all steps were accelerated:', stableFast.typeset(found.accelerated.reason)], 'sfast-note');
        }
        const pair = add(box, 'div', undefined, 'sfast-pair');
        side(pair, 'With Stable Fast', found.accelerated, 'accelerated');
        side(pair, 'Without Stable Fast', found.original, 'original');
        add(box, 'p', 'The last image, made again with its seed. Nothing was saved.', 'sfast-weak');
    }

    async function load() {
        try {
            const answer = await fetch(ROOT);
            found = answer.ok ? (await answer.json()).comparison : null;
        } catch (error) {
            found = null;
        }
        number = Date.now();
    }

    window.stableFastComparison = {draw, load};
})();
